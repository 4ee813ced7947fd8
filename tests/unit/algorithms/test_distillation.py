"""On-policy distillation: the teacher's call and the student's update, held against TRL's losses in float64."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from realhf.algorithms.distill.config import Distill, distill_loss, with_teacher
from realhf.algorithms.script.rollouts import DistributionsInterface
from realhf.algorithms.script.update import UpdateInterface
from realhf.api.experiment import KeyLengths
from realhf.api.script.config import Distributions, Update
from realhf.api.script.views import View
from realhf.base.errors import UserError
from realhf.data import sort_task
from realhf.engine.batch import Batch
from realhf.experiments import ready_file
from realhf.lifecycle.request import experiment_of
from realhf.parallel.vocabulary import Logits
from realhf.planning.model.workload import workload_of
from tests.unit.algorithms.script_rollouts import ANSWERS, PROMPTS, ROLLOUT, rollouts

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from trl.experimental.gkd.gkd_trainer import GKDTrainer

VOCAB, STUDENT, TEACHER = 11, 6, 5  # tokens, and sizes of hidden states
TRL_VERSION = "1.16.0"
CASES = [(beta, temperature) for beta in (0.0, 0.3, 1.0) for temperature in (1.0, 0.7)]
RESPONSES = [len(answer) for answer in ANSWERS]


class HeadOfStates:
    """A language model whose hidden states are given, one row a token of `rollouts()`."""

    def __init__(self, hidden: Tensor, weight: Tensor):
        self.hidden, self.weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
        self.config = SimpleNamespace(head="lm")

    @property
    def head(self) -> Logits:
        return Logits(self.hidden, self.weight, chunk_bytes=4 * VOCAB * 8)

    @torch.no_grad()
    def forward(self, batch: Batch, tokens_key: str, postprocess: Any, micro_batches: int) -> Any:
        return postprocess(self.head, batch)

    def train_step(self, batch: Batch, tokens_key: str, loss: Any, weight: Any, micro_batches: int) -> Any:
        value, stats = loss(self.head, batch)
        (value / weight(batch)).backward()
        return {**stats, "loss": (value.item(), weight(batch))}


@pytest.fixture
def states() -> dict[str, Tensor]:
    """Hidden states of the tokens of `rollouts()` and the weights of both heads, float64."""
    generator, tokens = torch.Generator().manual_seed(0), sum(map(len, (*PROMPTS, *ANSWERS)))
    shapes = {
        "student_hidden": (tokens, STUDENT),
        "student_weight": (VOCAB, STUDENT),
        "teacher_hidden": (tokens, TEACHER),
        "teacher_weight": (VOCAB, TEACHER),
    }
    return {name: torch.randn(s, generator=generator, dtype=torch.float64) for name, s in shapes.items()}


def predicting(of_tokens: Tensor) -> Tensor:
    """The rows that predict the tokens of responses, [responses, ...]."""
    sequences = of_tokens.split([len(p) + len(a) for p, a in zip(PROMPTS, ANSWERS, strict=True)])
    return torch.cat([x[len(p) - 1 : -1] for x, p in zip(sequences, PROMPTS, strict=True)])


Ours = Callable[..., tuple[Tensor, Tensor, Tensor]]


@pytest.fixture
def ours(states: dict[str, Tensor], context: Any) -> Ours:
    """The loss of a mini-batch, and its gradients: of the hidden states that predict, and of the weight."""

    def compute(beta: float, temperature: float, top_k: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        teacher = HeadOfStates(states["teacher_hidden"], states["teacher_weight"])
        student = HeadOfStates(states["student_hidden"], states["student_weight"])
        call = Distributions(batch=ROLLOUT, temperature=temperature, top_k=top_k)
        made = DistributionsInterface(call).inference(teacher, rollouts(), context()).outputs
        own = View(tuple((key, key) for key in call.output_data))
        distill = Distill(eos_token=-1, beta=beta, temperature=temperature, teacher_top_k=top_k)
        update = Update(
            distill_loss(distill), batch=with_teacher(ROLLOUT, own), temperature=temperature, prefix="actor"
        )
        stats = UpdateInterface(update).train_step(student, [rollouts(**made)], context()).stats
        loss, weight = stats["actor_loss"]
        assert weight == sum(RESPONSES)
        return torch.tensor(loss / weight), predicting(student.hidden.grad), student.weight.grad

    return compute


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert expected.norm() > 1e-3
    torch.testing.assert_close(found, expected.to(found.dtype).view_as(found), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("beta", "temperature"), CASES)
def test_the_loss_is_that_of_trls_gkd(states: dict[str, Tensor], ours: Ours, beta: float, temperature: float) -> None:
    hidden, weight = (states[name].clone().requires_grad_() for name in ("student_hidden", "student_weight"))
    rows = predicting(hidden)
    teacher = F.linear(predicting(states["teacher_hidden"]), states["teacher_weight"])
    each = GKDTrainer.generalized_jsd_loss(
        F.linear(rows, weight), teacher, beta=beta, temperature=temperature, reduction="none"
    )
    expected = each.sum() / sum(RESPONSES)
    for found, right in zip(
        ours(beta, temperature), (expected, *torch.autograd.grad(expected, (rows, weight))), strict=True
    ):
        assert_close(found, right.detach())


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_trls_trainer(states: dict[str, Tensor], ours: Ours, tmp_path: Path) -> None:
    """Of a newer TRL than the installed one, in a folder of its own."""
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "trl"), f"trl=={TRL_VERSION}"]
    installed = subprocess.run([sys.executable, *install], capture_output=True, text=True, timeout=300)
    if installed.returncode:
        pytest.skip(f"pip cannot get trl {TRL_VERSION}: {installed.stderr.strip().splitlines()[-1]}")
    longest = max(RESPONSES)
    rows = {name: predicting(states[name]).split(RESPONSES) for name in ("student_hidden", "teacher_hidden")}
    given = {name: torch.nn.utils.rnn.pad_sequence(list(each), batch_first=True) for name, each in rows.items()}
    given |= {name: states[name] for name in ("student_weight", "teacher_weight")}
    mask = torch.arange(longest) < torch.tensor(RESPONSES)[:, None]
    save_file({**given, "mask": mask.long()}, tmp_path / "in.safetensors", {"cases": json.dumps(CASES)})
    oracle = [
        Path(__file__).with_name("trl_distillation.py"),
        tmp_path / "in.safetensors",
        tmp_path / "out.safetensors",
    ]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "trl")}
    subprocess.run([sys.executable, *map(str, oracle)], env=environment, check=True, timeout=300)
    expected = load_file(tmp_path / "out.safetensors")
    for number, case in enumerate(CASES):
        loss, of_hidden, of_weight = ours(*case)
        assert_close(loss, expected[f"{number} loss"])
        assert_close(of_hidden, expected[f"{number} hidden"][mask])
        assert_close(of_weight, expected[f"{number} weight"])


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_with_all_tokens_but_one_named_nothing_is_lost(ours: Ours, beta: float) -> None:
    for whole, in_part in zip(ours(beta, 0.7), ours(beta, 0.7, top_k=VOCAB - 1), strict=True):
        assert_close(in_part, whole)
    assert ours(beta, 0.7, top_k=2)[0] < ours(beta, 0.7)[0]


@pytest.mark.parametrize("top_k", [0, 3])
def test_the_teachers_distributions(states: dict[str, Tensor], context: Any, top_k: int) -> None:
    teacher = HeadOfStates(states["teacher_hidden"], states["teacher_weight"])
    call = Distributions(batch=ROLLOUT, temperature=0.5, top_k=top_k, outputs=("t", "best")[: 2 if top_k else 1])
    made = DistributionsInterface(call).inference(teacher, rollouts(), context()).outputs
    logits = F.linear(predicting(states["teacher_hidden"]), states["teacher_weight"])
    expected = (logits / 0.5).softmax(-1)
    found = torch.cat(made["t"]).exp()
    assert [len(x) for x in made["t"]] == RESPONSES
    torch.testing.assert_close(found.sum(-1), torch.ones(len(found), dtype=torch.float64))
    if top_k:
        best = torch.cat(made["best"])
        assert torch.equal(best, logits.topk(top_k).indices)
        found, expected = found[:, :-1], expected.gather(1, best)
    torch.testing.assert_close(found, expected)
    assert DistributionsInterface(call).inference(teacher, rollouts(), context(holds_outputs=False)).outputs == {}


def test_float32_at_least(states: dict[str, Tensor], context: Any) -> None:
    teacher = HeadOfStates(*(states[name].bfloat16() for name in ("teacher_hidden", "teacher_weight")))
    (column,) = DistributionsInterface(Distributions(batch=ROLLOUT)).inference(teacher, rollouts(), context()).outputs
    assert column == "teacher_logprob"
    made = DistributionsInterface(Distributions(batch=ROLLOUT)).inference(teacher, rollouts(), context()).outputs
    assert made[column][0].dtype == torch.float32


SMALL = ("--architecture.vocab-size", "32")


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    """Options of a student of random weights, with a tokenizer and data, which nobody reads here."""
    sort_task.make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return ("--data", str(tmp_path / "rows.jsonl"), "--tokenizer", str(tmp_path / "tokenizer.json"), *SMALL)


def teacher_of(folder: Path, vocab_size: int, tokenizer: str | None = None) -> str:
    """A folder that describes a model, without weights."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(tokenizer)
    return str(folder)


def graph_of(*words: str) -> Any:
    return experiment_of(str(ready_file("distill")), words).graph


def test_the_teacher_is_one_more_model_of_the_graph(words: tuple[str, ...], tmp_path: Path) -> None:
    tokenizer = (tmp_path / "tokenizer.json").read_text()
    teacher = ("--teacher", teacher_of(tmp_path / "teacher", 32, tokenizer))
    graph = graph_of(*words, *teacher, "--distill.temperature", "0.7", "--distill.teacher-top-k", "8")
    assert list(graph.calls) == ["actor_generate", "teacher_inference", "actor_train_step"]
    call, update = (graph.calls[name].interface_impl for name in ("teacher_inference", "actor_train_step"))
    assert (call.temperature, call.top_k, update.temperature) == (0.7, 8, 0.7)
    assert graph.calls["teacher_inference"].config.num_layers == 1


@pytest.mark.parametrize(("top_k", "wide_bytes"), [("0", 4 * 32), ("8", 4 * 9 + 8 * 8)])
def test_the_planner_knows_what_distributions_take(
    words: tuple[str, ...], tmp_path: Path, top_k: str, wide_bytes: int
) -> None:
    teacher = ("--teacher", teacher_of(tmp_path / "teacher", 32), "--distill.teacher-top-k", top_k)
    workload = workload_of(graph_of(*words, *teacher), {"prompt": KeyLengths.constant(8)})
    found = {name: workload.of(name) for name in ("actor_generate", "teacher_inference", "actor_train_step")}
    assert [each.wide_bytes for each in found.values()] == [0, wide_bytes, wide_bytes]
    assert {each.new_tokens for each in found.values()} == {256}


@pytest.mark.parametrize(
    ("vocab_size", "options", "message"),
    [
        (0, (), r"there is no teacher; give --teacher DIR"),
        (
            48,
            (),
            r"teacher \(.*\) and actor \(random weights\) have different vocabularies: vocab_size is 48 against 32",
        ),
        (32, ("--distill.teacher-top-k", "32"), r"top_k=32 must be from 0 .* to below vocab_size=32"),
        (32, ("--distill.beta", "1.5"), r"beta 1\.5 is not from 0 to 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    words: tuple[str, ...], tmp_path: Path, vocab_size: int, options: tuple[str, ...], message: str
) -> None:
    teacher = ("--teacher", teacher_of(tmp_path / "teacher", vocab_size)) if vocab_size else ()
    with pytest.raises(UserError, match=message):
        graph_of(*words, *teacher, *options)


def test_a_teacher_with_another_tokenizer_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    teacher = teacher_of(tmp_path / "teacher", 32, json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"different vocabularies: the id of the token '[ab]' is"):
        graph_of(*words, "--teacher", teacher)
