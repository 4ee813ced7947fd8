"""The transformers backend beside `transformers` itself and beside the native backend, in float64."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from realhf.api.experiment import ModelSetup, OptimizerConfig
from realhf.api.generation import GenerationOptions
from realhf.architecture.compute import ComputeConfig
from realhf.architecture.decoding import graphs_refusal
from realhf.architecture.model import Head
from realhf.architecture.named import architecture
from realhf.architecture.transformers_config import TransformersConfig, check_backend, transformers_model
from realhf.base.errors import UserError
from realhf.engine.backend import ModelSpec, build_model
from realhf.engine.batch import Batch
from realhf.engine.interface import GenerationOutput, GenerationRequest
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy, check_strategy
from realhf.geometry.parameters import decoder_parameters, parameter_count
from realhf.geometry.shards import shard_boxes
from realhf.models.checkpoint import CheckpointReader
from realhf.models.checkpoint_index import STEPS_KEY, finish, state_owners
from realhf.models.convert import Conversion, convert
from realhf.parallel.vocabulary import WholeLogits
from realhf.planning.options import legal_strategies
from tests.unit.checkpoints import write_pieces
from tests.unit.engine.losses import (
    ONE_RANK,
    next_token_loss,
    random_batch,
    split_like,
    targets,
    trained_tokens,
    value_loss,
)
from tests.unit.models.families import Oracle, computing_in, distance, load
from tests.unit.models.transformers_families import FAMILIES, described, loaded, small

OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, warmup_steps=2, max_grad_norm=0.5)
STEPS = 10


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Oracle, TransformersConfig]]:
    """Models of `FAMILIES`, each made when it is asked for."""
    made: dict[str, tuple[Oracle, TransformersConfig]] = {}

    def get(family: str) -> tuple[Oracle, TransformersConfig]:
        if family not in made:
            found = small(family, tmp_path_factory.mktemp(family))
            made[family] = found, described(found.directory)
        return made[family]

    return get


def logprobs(output: WholeLogits, batch: Batch) -> dict[str, list[Tensor]]:
    tokens = targets(batch)[0]
    return {"logprob": list(output.of_tokens(tokens).logprob.split([len(t) for t in batch.data["tokens"]]))}


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_one_step_are_those_of_transformers(family: str, saved, tmp_path: Path) -> None:
    theirs, config = saved(family)
    model = loaded(theirs.directory, config, optimizer=OPTIMIZER, total_optimizer_steps=STEPS)
    batch = random_batch(config, 6)
    tokens, in_loss = targets(batch)
    with computing_in(torch.float64):
        hf = AutoModelForCausalLM.from_pretrained(theirs.directory, dtype=torch.float64)
        ours = torch.cat(model.forward(batch, "tokens", logprobs, 2)["logprob"])
        expected = torch.cat([hf(input_ids=t[None]).logits[0] for t in batch.data["tokens"]]).log_softmax(-1)
        expected = expected.gather(-1, tokens[:, None])[:, 0]
        torch.testing.assert_close(ours, expected, atol=1e-12, rtol=0)

        stats = model.train_step(batch, "tokens", next_token_loss, trained_tokens, 3)
        optimizer = torch.optim.AdamW(hf.parameters(), lr=OPTIMIZER.lr / 2, betas=(0.9, 0.95), weight_decay=0.1)
        (-expected[in_loss].sum() / in_loss.sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(hf.parameters(), OPTIMIZER.max_grad_norm).item()
        before = {name: p.detach().clone() for name, p in hf.named_parameters()}
        optimizer.step()
    assert stats["grad_norm"][0] == pytest.approx(norm, rel=1e-9)
    assert stats["lr"] == (OPTIMIZER.lr / 2, 1.0)
    after = dict(hf.named_parameters())
    held = {box.name: tensor for box, tensor in model.residency.held()}
    assert held.keys() == after.keys()
    for name, tensor in held.items():
        assert distance(tensor - before[name], after[name].detach() - before[name]) < 1e-7, name


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_a_known_family_gives_the_same_on_both_backends(head: Head, saved) -> None:
    """Log-probabilities or values, and a step of AdamW."""
    theirs, config = saved("Llama")
    config = config.with_head(head)
    arguments = {"optimizer": OPTIMIZER, "total_optimizer_steps": STEPS}
    native = build_model("native", ModelSpec(theirs.config.with_head(head), ONE_RANK, torch.float64, **arguments))
    native.initialise(3)
    with computing_in(torch.float64):
        model = build_model("transformers", ModelSpec(config, ONE_RANK, torch.float64, **arguments))
    there = {box.name: tensor for box, tensor in native.residency.held()}
    for box, tensor in model.residency.held():
        tensor.copy_(there.pop(box.name))
    model.residency.written()
    assert not there
    batch = random_batch(config, 6)
    loss = value_loss if head == "scalar" else next_token_loss
    for _ in range(2):
        with computing_in(torch.float64):
            ours, expected = (m.forward(batch, "tokens", split_like, 2)["output"] for m in (model, native))
            stats, other_stats = (m.train_step(batch, "tokens", loss, trained_tokens, 2) for m in (model, native))
        for mine, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-10, rtol=0)
        assert {key: pytest.approx(pair, rel=1e-9) for key, pair in other_stats.items()} == stats


OPTIONS = {
    "all": GenerationOptions(max_new_tokens=8, eos_token=3),
    "greedy": GenerationOptions(max_new_tokens=8, eos_token=3, temperature=0),
    "truncated": GenerationOptions(max_new_tokens=8, eos_token=3, temperature=0.7, top_k=9, top_p=0.8),
    "stops": GenerationOptions(max_new_tokens=8, eos_token=-1, min_new_tokens=2, stop_sequences=((5,), (7,), (1,))),
    "little room": GenerationOptions(max_new_tokens=8, eos_token=3, kv_cache_tokens=40),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_known_family_gives_the_same_rollouts_on_both_backends(name: str, saved) -> None:
    theirs, config = saved("Llama")
    native, model = load(theirs.directory, theirs.config, torch.float64), loaded(theirs.directory, config)
    batch = random_batch(config, 7)
    request = GenerationRequest(
        OPTIONS[name],
        sample_key=(11, 2),
        prompt_key="tokens",
        micro_batches=2,
        return_logits=True,
        is_end=lambda response: bool(response[-1] == 4),
    )
    expected = native.generate(batch, request)
    forced = [s[len(p) :] for s, p in zip(expected.sequences, batch.data["tokens"], strict=True)]
    again = replace(request, forced=forced)
    with computing_in(torch.float64):
        check_same(model.generate(batch, request), expected)
        check_same(model.generate(batch, again), native.generate(batch, again))


def check_same(ours: GenerationOutput, expected: GenerationOutput) -> None:
    assert len({len(sequence) for sequence in expected.sequences}) > 2, "responses must differ in length"
    assert [s.tolist() for s in ours.sequences] == [s.tolist() for s in expected.sequences]
    for field in ("logprobs", "untruncated_logprobs", "margins", "logits"):
        for mine, other in zip(getattr(ours, field), getattr(expected, field), strict=True):
            torch.testing.assert_close(mine, other, atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", ["Gemma3Text", "Olmo2", "Phi"])
def test_rollouts_are_drawn_from_the_logits_of_their_sequences(family: str, saved) -> None:
    """With the cache, behind padding, as in a pass over the whole sequence."""
    theirs, config = saved(family)
    model = loaded(theirs.directory, config)
    batch = random_batch(config, 6)
    options = GenerationOptions(max_new_tokens=7, eos_token=3)
    with computing_in(torch.float64):
        request = GenerationRequest(options, sample_key=(1, 0), prompt_key="tokens", return_logits=True)
        made = model.generate(batch, request)
        whole = theirs.logits(made.sequences).split([len(s) for s in made.sequences])
    for prompt, drawn, logits in zip(batch.data["tokens"], made.logits, whole, strict=True):
        torch.testing.assert_close(drawn, logits[len(prompt) - 1 : -1], atol=1e-10, rtol=0)


def test_a_checkpoint_goes_out_and_in(saved, tmp_path: Path) -> None:
    """Of boxes, with the optimizer; then as a directory that transformers opens."""
    theirs, config = saved("Gemma3Text")
    arguments = {"optimizer": OPTIMIZER, "total_optimizer_steps": STEPS}
    model = loaded(theirs.directory, config, **arguments)
    batch = random_batch(config, 6)
    with computing_in(torch.float64):
        model.train_step(batch, "tokens", next_token_loss, trained_tokens, 1)
        write_pieces(tmp_path / "boxes", 0, model.state())
        owners = state_owners(config, ONE_RANK.layout, "float64")
        finish(tmp_path / "boxes", config, "float64", owners, {STEPS_KEY: 1})
        twin = build_model("transformers", ModelSpec(config, ONE_RANK, torch.float64, **arguments))
        twin.load_state(CheckpointReader(tmp_path / "boxes"))
        steps = [m.train_step(batch, "tokens", next_token_loss, trained_tokens, 1) for m in (model, twin)]
        assert steps[0] == steps[1]
        for (_, ours), (_, other) in zip(model.state(), twin.state(), strict=True):
            assert torch.equal(ours, other)

        convert(Conversion(source=str(tmp_path / "boxes"), target=str(tmp_path / "out")), lambda _: None)
        hf = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
        saved_model = loaded(tmp_path / "boxes", config)
        for tokens, logits in zip(
            batch.data["tokens"], saved_model.forward(batch, "tokens", split_like, 1)["output"], strict=True
        ):
            torch.testing.assert_close(hf(input_ids=tokens[None]).logits[0], logits, atol=1e-12, rtol=0)


def test_what_is_known_of_a_model_without_torch(saved) -> None:
    theirs, config = saved("Gemma3Text")
    assert dict(config.parameters) == {name: tuple(p.shape) for name, p in theirs.hf.named_parameters()}
    assert (config.num_layers, config.head_dim, config.head_parameters) == (2, 8, ())
    assert parameter_count(config) == theirs.hf.num_parameters()
    places = [spec.place for spec in decoder_parameters(config)]
    assert places == ["embedding"] + 26 * ["layer"] + ["head"]
    untied = saved("Phi")[1]
    names = {spec.name: spec.shape for spec in decoder_parameters(untied.with_head("scalar"))}
    assert untied.head_parameters == ("lm_head.weight", "lm_head.bias")
    assert not names.keys() & set(untied.head_parameters)
    assert names["score.weight"] == (1, 32)


def test_every_shard_is_a_part_of_a_dimension(saved) -> None:
    config = saved("Gemma3Text")[1].with_head("scalar")
    layout = Layout(DeviceMesh(0, 2), ParallelStrategy(dp=2))
    shards = [dict(shard_boxes(config, layout, rank, "fsdp", only_counted=True)) for rank in (0, 1)]
    for spec in decoder_parameters(config):
        first, second = (next(box for box in rank if box.name == spec.name) for rank in shards)
        assert first.size + second.size == spec.size
        assert first.intersect(second) is None
    assert [box.shape for box in shards[0] if box.name == "score.weight"] == [(1, 16)]  # one row has no half
    with pytest.raises(UserError, match=r"dp=5: dp divides no dimension of model.embed_tokens.weight"):
        shard_boxes(config, Layout(DeviceMesh(0, 5), ParallelStrategy(dp=5)), 0, "fsdp")


def test_what_is_refused(saved, tmp_path: Path) -> None:
    theirs, config = saved("Olmo2")
    known = saved("Llama")[0].config

    def refused(message: str, function: Callable[[], object]) -> None:
        with pytest.raises(UserError, match=re.escape(message)):
            function()

    refused(
        "a: tp=2 pp=1, but transformers computes the model", lambda: check_strategy("a", config, ParallelStrategy(tp=2))
    )
    refused("tp=1 pp=2, but transformers", lambda: check_strategy("a", config, ParallelStrategy(pp=2)))
    refused("a is a 'olmo2', which transformers alone can build", lambda: check_backend("a", config, "native"))
    refused("a has backend='transformers' and an architecture of", lambda: check_backend("a", known, "transformers"))
    check_backend("a", config, "my.module:Model")
    for compute in (ComputeConfig(recomputation="full"), ComputeConfig(sequence_parallel=True)):
        refused("knows data_parallel of", lambda c=compute: ModelSetup(backend="transformers", compute=c))
    refused("model_type='olmo2' is not supported", lambda: architecture(str(theirs.directory)))
    refused("have transformers compute the model (backend=", lambda: architecture(str(theirs.directory)))
    assert [s.dp for s in legal_strategies(config, 4)] == [4]
    assert graphs_refusal(config, on_gpu=True) == "transformers computes the model"
    scalar = loaded(theirs.directory, config).config.with_head("scalar")
    refused("has no score.weight", lambda: loaded(theirs.directory, scalar))
    model = loaded(theirs.directory, config)
    batch = random_batch(config, 2)
    options = GenerationOptions(max_new_tokens=8, eos_token=3, kv_cache_tokens=9)
    refused(
        "kv_cache_tokens=9 does not hold one sequence",
        lambda: model.generate(batch, GenerationRequest(options, sample_key=(0, 0), prompt_key="tokens")),
    )

    planned = GenerationRequest(
        replace(options, kv_cache_tokens=None), sample_key=(0, 0), prompt_key="tokens", planned_room=9
    )
    assert model._together(batch, planned) == 1

    content = (theirs.directory / "config.json").read_text()
    path = tmp_path / "config.json"
    refused("cannot read the architecture", lambda: transformers_model(tmp_path))
    for change, message in {
        '"model_type": "nobodys"': "transformers cannot build it: transformers",
        '"model_type": "nobodys", "auto_map": {"AutoConfig": "code.Config"}': "auto_map names, is never executed",
        '"model_type": "olmo2", "quantization_config": {"bits": 4}': "quantization_config is not supported",
    }.items():
        path.write_text(content.replace('"model_type": "olmo2"', change))
        refused(message, lambda: described(tmp_path))
    path.write_text("{")
    refused("not a config.json", lambda: described(tmp_path))
