"""Tokens and lengths that a model cannot read are refused before a run starts."""

import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from safetensors.numpy import save_file

from realhf.algorithms.sft.config import sft_loss
from realhf.api import Generate, GenerationOptions, InterfaceConfig, Score, Update
from realhf.api.experiment import DatasetExtent, KeyExtent
from realhf.architecture.hugging_face import decoder_of, write_config
from realhf.architecture.model import DecoderConfig, RopeScaling
from realhf.base.errors import UserError
from realhf.cli import main
from realhf.data import sort_task
from realhf.data.datasets import PromptDataset, SFTDataset
from realhf.data.fit import check_fit, check_replay
from realhf.data.text_dataset import TextDataset
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph, ModelFunctionCallDef

# <bos> is 1, <eos> 2, ">" 3, "a" 4, "z" 29; " " is 31, the largest.
MODEL = DecoderConfig(hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, vocab_size=32)
LINES = ['{"prompt": "a>", "answer": "a"}', '{"prompt": "za>", "answer": "az"}', '{"prompt": "b>", "answer": "b"}']


@dataclass(frozen=True, kw_only=True)
class Sampler(InterfaceConfig):
    """GENERATE: a user's own, which does not derive from the options."""

    implementation: ClassVar[str] = "mine:Sampler"

    drawing: GenerationOptions


def data_set(folder: Path, kind: type[TextDataset]) -> TextDataset:
    sort_task.make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "data.jsonl").write_text("\n".join(LINES))
    return kind(path=str(folder / "data.jsonl"), tokenizer=str(folder / "tokenizer.json"), max_prompt_tokens=4)


def extent_of(folder: Path, kind: type[TextDataset]) -> DatasetExtent:
    return data_set(folder, kind).check()


def sft_graph(model: DecoderConfig) -> DataflowGraph:
    call = ModelFunctionCallDef(
        model_name="sft",
        model_type=model,
        interface_type=TRAIN_STEP,
        interface_impl=Update(sft_loss(), rows="examples"),
        input_data=["tokens"],
    )
    return DataflowGraph([call], ("tokens", "prompt_length"))


def rollout_graph(actor: DecoderConfig, reward: DecoderConfig = MODEL, **options: object) -> DataflowGraph:
    generate = ModelFunctionCallDef(
        model_name="actor",
        model_type=actor,
        interface_type=GENERATE,
        interface_impl=Generate(**({"max_new_tokens": 9, "eos_token": 2} | options)),
        input_data=["prompt"],
        output_data=["seq"],
    )
    judge = ModelFunctionCallDef(
        name="reward",
        model_name="reward",
        model_type=reward.with_head("scalar"),
        interface_type=INFERENCE,
        interface_impl=Score(),
        input_data=["seq"],
        output_data=["score"],
    )
    return DataflowGraph([generate, judge], ("prompt",))


def refusal(graph: DataflowGraph, extent: DatasetExtent) -> str:
    with pytest.raises(UserError) as error:
        check_fit(graph, extent)
    return str(error.value)


def test_what_a_data_set_holds(tmp_path: Path) -> None:
    extent = extent_of(tmp_path, SFTDataset)
    assert (extent.rows, set(extent.keys), extent.largest_token) == (3, {"tokens"}, 31)
    tokens = extent.keys["tokens"]  # <bos> z a > a z <eos> in line 2
    assert (tokens.longest, tokens.largest) == (7, 29)
    assert tokens.longest_at == tokens.largest_at == f"{tmp_path}/data.jsonl, line 2"


def test_what_fits_is_accepted(tmp_path: Path) -> None:
    check_fit(sft_graph(MODEL), extent_of(tmp_path, SFTDataset))
    check_fit(rollout_graph(MODEL, stop_sequences=((3, 31),)), extent_of(tmp_path, PromptDataset))


def test_an_id_beyond_the_vocabulary_names_file_line_and_id(tmp_path: Path) -> None:
    says = refusal(sft_graph(replace(MODEL, vocab_size=29)), extent_of(tmp_path, SFTDataset))
    assert says == (
        f"{tmp_path}/data.jsonl, line 2: 'tokens' has the token id 29, and model 'sft' of sft_train_step has "
        "vocab_size=29, ids from 0 to 28; use the tokenizer that the model was made with, or a model with that id"
    )


def test_a_tokenizer_larger_than_the_vocabulary_of_any_model_that_reads_its_tokens(tmp_path: Path) -> None:
    extent, small = extent_of(tmp_path, PromptDataset), replace(MODEL, vocab_size=31)
    says = refusal(rollout_graph(MODEL, reward=small), extent)
    assert f"tokenizer {tmp_path}/tokenizer.json: its largest token id is 31, and model 'reward' of reward has" in says


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"eos_token": 32}, "eos_token=32, and model 'actor' of actor_generate has vocab_size=32, ids from 0 to 31"),
        ({"stop_sequences": ((3, 4), (5, 99))}, "stop_sequences has the token id 99 in (5, 99), and model 'actor'"),
    ],
)
def test_tokens_that_cannot_end_a_response(tmp_path: Path, options: dict[str, object], says: str) -> None:
    graph, extent = rollout_graph(MODEL, **options), extent_of(tmp_path, PromptDataset)
    assert says in refusal(graph, extent)
    derived = graph.calls["actor_generate"]
    in_a_field = replace(derived, interface_impl=Sampler(drawing=derived.interface_impl))
    assert says in refusal(DataflowGraph([in_a_field], ("prompt",)), extent)


@pytest.mark.parametrize(
    ("limited", "positions"),
    [
        (replace(MODEL, positions="learned", max_positions=6), "positions for 6 (max_positions)"),
        (replace(MODEL, max_position_embeddings=6), "positions for 6 (max_position_embeddings)"),
        (
            replace(MODEL, max_position_embeddings=3, rope_scaling=RopeScaling(kind="linear", factor=2.0)),
            "positions for 6 (max_position_embeddings)",
        ),
    ],
)
def test_a_row_beyond_the_positions_of_a_model(tmp_path: Path, limited: DecoderConfig, positions: str) -> None:
    assert refusal(sft_graph(limited), extent_of(tmp_path, SFTDataset)) == (
        f"{tmp_path}/data.jsonl, line 2: 'tokens' has 7 tokens, and model 'sft' of sft_train_step has {positions}; "
        "shorten or delete that line, or set a limit (--max-prompt-tokens, --max-tokens) with --too-long drop, or use "
        "a model of longer sequences"
    )


def test_a_response_beyond_the_positions_of_any_model_that_reads_it(tmp_path: Path) -> None:
    extent, short = extent_of(tmp_path, PromptDataset), replace(MODEL, max_position_embeddings=12)
    check_fit(rollout_graph(short, reward=short, max_new_tokens=8), extent)
    for actor, reward, name in ((short, MODEL, "'actor' of actor_generate"), (MODEL, short, "'reward' of reward")):
        assert refusal(rollout_graph(actor, reward=reward, max_new_tokens=9), extent) == (
            f"{tmp_path}/data.jsonl, line 2: 'prompt' has 4 tokens, and with max_new_tokens=9 of actor_generate 13, "
            f"and model {name} has positions for 12 (max_position_embeddings); lower max_new_tokens, shorten or delete "
            "that line, or set a limit (--max-prompt-tokens, --max-tokens) with --too-long drop, or use a model of "
            "longer sequences"
        )


def test_the_longest_sequence_of_a_hugging_face_checkpoint_is_known_and_written_back() -> None:
    content = write_config(MODEL, "float32") | {"max_position_embeddings": 12}
    model = decoder_of(content)
    assert (model, model.longest_sequence, model.with_head("scalar").longest_sequence) == (MODEL, 12, 12)
    assert write_config(model, "float32")["max_position_embeddings"] == 12


def recorded(folder: Path, **samples: list[int]) -> Path:
    """Step 1 of a run's rollouts, by sample."""
    (folder / "step-1").mkdir(exist_ok=True)
    tensors = {f"seq/{name[1:]}": np.array(tokens) for name, tokens in samples.items()}
    save_file(tensors, folder / "step-1" / "actor_generate-0.safetensors")
    return folder


def test_recorded_rollouts_beyond_the_vocabulary_name_file_sample_and_id(tmp_path: Path) -> None:
    graph, one = rollout_graph(replace(MODEL, vocab_size=64)), range(1)
    check_replay(graph, recorded(tmp_path, s0=[1, 4], s1=[1, 31]), one, 2)
    for token in (32, 10**9, -1):  # 32 is no token of the reward model
        with pytest.raises(UserError) as error:
            check_replay(graph, recorded(tmp_path, s0=[1, 4], s1=[1, token]), one, 2)
        assert (
            f"step-1/actor_generate-0.safetensors: 'seq' of sample 1 has the token id {token}, and model 'rew"
            in str(error.value)
        )


def test_the_smallest_numbers_that_fit(tmp_path: Path) -> None:
    """A model of one token reads token 0, and empty responses; -1 as an end token is none."""
    one = replace(MODEL, vocab_size=1, max_position_embeddings=9)
    extent = DatasetExtent(
        path="a.jsonl",
        rows=1,
        keys={"prompt": KeyExtent(mean=0, mean_square=0, longest=0, longest_at="l", largest=0, largest_at="m")},
        tokenizer="t",
        largest_token=0,
    )
    graph = rollout_graph(one, reward=one, eos_token=-1)
    check_fit(graph, extent)
    check_replay(graph, recorded(tmp_path, s0=[0], s1=[]), range(1), 2)
    with pytest.raises(UserError, match=r"'seq' of sample 1 has the token id -1, and .* ids from 0 to 0; give"):
        check_replay(graph, recorded(tmp_path, s0=[0], s1=[-1]), range(1), 2)
    assert "l: 'prompt' has 0 tokens, and with max_new_tokens=10 of actor_generate 10, and model 'actor'" in refusal(
        rollout_graph(one, reward=one, eos_token=-1, max_new_tokens=10), extent
    )


def test_only_calls_with_a_model_and_known_lengths_are_compared(tmp_path: Path) -> None:
    """A key that no file and no generation gives has no length; a rule reads columns, and no tokens."""
    extent = extent_of(tmp_path, SFTDataset)
    short = replace(MODEL, max_position_embeddings=8)
    other = ModelFunctionCallDef(
        model_name="judge",
        model_type=short.with_head("scalar"),
        interface_type=INFERENCE,
        interface_impl=Score(),
        input_data=["tokens", "text"],
        output_data=["score"],
    )
    check_fit(DataflowGraph([other], ("tokens", "text")), extent)
    asked: list[tuple[str, ...]] = []

    class Rule(Score):
        uses_model = False

        def check_columns(self, columns: Collection[str]) -> None:
            asked.append(tuple(columns))

    tiny = replace(MODEL, vocab_size=2, max_position_embeddings=1)
    rule = replace(other, model_name="rule", model_type=tiny.with_head("scalar"), interface_impl=Rule())
    check_fit(DataflowGraph([rule], ("tokens", "text")), extent)
    assert asked == [("prompt", "answer")]


def test_of_a_generation_the_first_output_is_its_sequence(tmp_path: Path) -> None:
    """Further outputs have lengths that are not known. Only calls that read it with a model count."""
    graph = rollout_graph(MODEL)
    generate, judge = graph.calls.values()
    generate = replace(generate, output_data=["seq", "more"])
    extent = extent_of(tmp_path, PromptDataset)
    short = replace(MODEL, max_position_embeddings=12).with_head("scalar")
    more = replace(judge, model_type=short, input_data=["more"])
    check_fit(DataflowGraph([generate, more], ("prompt",)), extent)
    assert "'reward' of reward has positions for 12" in refusal(
        DataflowGraph([generate, replace(more, input_data=["seq"])], ("prompt",)), extent
    )

    class Rule(Score):
        uses_model = False

    tiny = replace(MODEL, vocab_size=2).with_head("scalar")
    rule = replace(judge, model_type=tiny, interface_impl=Rule())
    check_replay(DataflowGraph([generate, rule], ("prompt",)), recorded(tmp_path, s0=[31]), range(1), 1)
    judged = DataflowGraph([generate, replace(judge, model_type=tiny)], ("prompt",))
    with pytest.raises(UserError, match="sample 0 has the token id 31, and model 'reward' of reward has vocab_size=2"):
        check_replay(judged, tmp_path, range(1), 1)


def test_options_of_generation_matter_where_a_call_generates(tmp_path: Path) -> None:
    extent = extent_of(tmp_path, SFTDataset)
    options = Generate(max_new_tokens=9, eos_token=99)
    train = ModelFunctionCallDef(
        model_name="actor", model_type=MODEL, interface_type=TRAIN_STEP, interface_impl=options, input_data=["tokens"]
    )
    check_fit(DataflowGraph([train], ("tokens",)), extent)
    generate = replace(train, interface_type=GENERATE, output_data=["seq"])
    assert "eos_token=99" in refusal(DataflowGraph([generate], ("tokens",)), extent)


def test_a_generation_of_an_unknown_length(tmp_path: Path) -> None:
    """Without a prompt, and without a number of new tokens, nothing is known of what is generated."""
    extent = extent_of(tmp_path, PromptDataset)
    tiny = replace(MODEL, max_position_embeddings=4)
    options = Generate(max_new_tokens=9, eos_token=2)
    for inputs, implementation in (([], options), (["prompt"], Score())):
        call = ModelFunctionCallDef(
            model_name="actor",
            model_type=tiny,
            interface_type=GENERATE,
            interface_impl=implementation,
            input_data=inputs,
            output_data=["seq"],
        )
        check_fit(DataflowGraph([call], ("prompt",)), extent)


def test_a_generation_without_outputs_has_nothing_recorded(tmp_path: Path) -> None:
    generate = replace(rollout_graph(MODEL).calls["actor_generate"], output_data=[])
    check_replay(DataflowGraph([generate], ("prompt",)), tmp_path, range(3), 2)
    with pytest.raises(UserError, match="no 'seq' of actor_generate, step 1"):
        check_replay(rollout_graph(MODEL), tmp_path, range(3), 2)


def test_every_step_and_every_sample_of_recorded_rollouts_is_looked_at(tmp_path: Path) -> None:
    graph = rollout_graph(MODEL)
    check_replay(graph, recorded(tmp_path, s0=[1], s1=[2], s2=[31]), range(1), 3)
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-2")
    recorded(tmp_path, s2=[1])
    with pytest.raises(UserError, match=f"^{re.escape(f'--replay {tmp_path}: step 1 has no')} 'seq' of sample 0"):
        check_replay(graph, tmp_path, range(2), 3)
    check_replay(graph, tmp_path, range(1, 2), 3)
    recorded(tmp_path, s0=[40, 1], s1=[50])
    with pytest.raises(UserError, match=r"sample 0 has the token id 40, .*; give rollouts of the same tokenizer"):
        check_replay(graph, tmp_path, range(1), 2)
    with pytest.raises(UserError, match="step 1 has no 'seq' of sample 2"):
        check_replay(graph, tmp_path, range(1), 4)


def test_recorded_rollouts_that_are_missing_or_damaged(tmp_path: Path) -> None:
    graph = rollout_graph(MODEL)
    recorded(tmp_path, s0=[1, 4])
    with pytest.raises(UserError, match="step 1 has no 'seq' of sample 1, and a step of this run has 2 samples"):
        check_replay(graph, tmp_path, range(1), 2)
    with pytest.raises(UserError, match="no 'seq' of actor_generate, step 2; record one with"):
        check_replay(graph, tmp_path, range(2), 1)
    (tmp_path / "step-1" / "actor_generate-0.safetensors").write_bytes(b"no file of tensors")
    with pytest.raises(UserError, match=r"actor_generate-0\.safetensors: no file of recorded rollouts \("):
        check_replay(graph, tmp_path, range(1), 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--architecture.vocab-size", "16"],
            "prompts.jsonl, line 3: 'prompt' has the token id 29, and model 'actor' of",
        ),
        (["--ppo.eos-token", "32"], "--ppo.eos-token=32, and model 'actor' of actor_generate has vocab_size=32"),
        (
            ["--architecture.positions", "learned", "--architecture.max-positions", "17"],
            "'prompt' has 9 tokens, and with --ppo.max-new-tokens=",
        ),
    ],
)
def test_the_command_line_refuses_it_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    folder = tmp_path / "run"
    command = ["run", "experiments/ppo.py", "--plan", "tests/plans/single.json", "--run-dir", str(folder)]
    assert main([*command, "--data-dir", str(tmp_path / "data"), *words]) == 2
    assert says in capsys.readouterr().err
    assert not folder.exists()
