"""One stage of a ring of three, with stand-ins for its peers and for its batches: what it sends, takes and computes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.base.errors import RunError
from realhf.engine.generate import ring
from realhf.engine.generate.loop import run_in_turns
from realhf.engine.generate.ring import BatchMessages

HIDDEN = torch.empty(0, 4, dtype=torch.bfloat16)
TIMEOUT_S = 7.0


class Pipeline:
    """The groups of rank 10 * stage, and what passes over them; `log` has everything in its order."""

    def __init__(self, stage: int, pp: int, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> None:
        self.stage, self.rank, self.is_first_stage, self.is_last_stage = stage, 10 * stage, stage == 0, stage == pp - 1
        self.pp, self.layout = pp, SimpleNamespace(strategy=SimpleNamespace(pp=pp))
        self.pipeline, self.waits, self.log, self.fails = "the stages", self, [], fails  # type: ignore[var-annotated]
        monkeypatch.setattr(ring.dist, "isend", self.isend)
        monkeypatch.setattr(ring.dist, "irecv", self.irecv)

    def stage_rank(self, stage: int) -> int:
        return 10 * (stage % self.pp)

    def isend(self, tensor: Tensor, peer: int, group: str) -> str:
        assert (tensor.is_contiguous(), group) == (True, "the stages")
        self.log.append(f"send {tensor.tolist()} to {peer}")
        return f"send to {peer}"

    def irecv(self, tensor: Tensor, peer: int, group: str) -> str:
        assert group == "the stages"
        self.log.append(f"receive {list(tensor.shape)} {tensor.dtype} from {peer}")
        tensor.fill_(8)
        return f"receive from {peer}"

    def wait(self, work: str, timeout_s: float, what: Callable[[], str]) -> None:
        assert timeout_s == TIMEOUT_S
        if self.fails:
            raise RuntimeError("gone")
        self.log.append(f"{work}: {what()}")


class Batch:
    """Ends after some steps, of which each draws two tokens from three rows."""

    def __init__(self, name: str, ends_after: int, pipeline: Pipeline) -> None:
        self.name, self.ends_after, self.steps, self.log = name, ends_after, 0, pipeline.log
        self.step: Any = None

    @property
    def is_done(self) -> bool:
        return self.steps == self.ends_after

    def admit(self) -> Any:
        self.log.append(f"admit {self.name}{self.steps}")
        self.step = SimpleNamespace(rows=3, drawing=[None, None])
        return self.step

    def forward(self, hidden: Tensor | None) -> Tensor:
        shown = "tokens" if hidden is None else f"{list(hidden.shape)}"
        self.log.append(f"forward {self.name}{self.steps} on {shown}")
        return torch.tensor([[1, 0], [2, 0]])[:, 0]  # not contiguous

    def draw(self, logits: Tensor) -> Tensor:
        self.log.append(f"draw from {logits.tolist()}")
        return logits + 4

    def accept(self, tokens: Tensor) -> str:
        self.log.append(f"accept {list(tokens.shape)} {tokens.dtype}")
        return f"{self.name}{self.steps}"

    def release(self, is_end: str) -> None:
        self.log.append(f"release {is_end}")
        self.steps += 1


def carried_out(pipeline: Pipeline, *steps: int) -> list[str]:
    batches: Any = [Batch(name, count, pipeline) for name, count in zip("abc", steps, strict=False)]
    groups: Any = pipeline
    run_in_turns(batches, [BatchMessages(groups, HIDDEN, TIMEOUT_S) for _ in batches])
    return pipeline.log


def test_the_first_stage_sends_hidden_states_and_hands_on_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = "send to 10: generate: rank 0 waited for rank 10 to take the hidden states of decode step"
    tokens = "send to 10: generate: rank 0 waited for rank 10 to take the tokens of decode step"
    took = "receive from 20: generate: rank 0 waited for the tokens of decode step"
    assert carried_out(Pipeline(0, 3, monkeypatch), 2, 1) == [
        "admit a0",
        "admit b0",
        "forward a0 on tokens",
        "send [1, 2] to 10",
        "forward b0 on tokens",
        "send [1, 2] to 10",
        "receive [2] torch.int64 from 20",
        f"{took} 0 from rank 20",
        f"{hidden} 0",
        "send [8, 8] to 10",
        "accept [2] torch.int64",
        "release a0",
        "admit a1",
        "forward a1 on tokens",
        "send [1, 2] to 10",
        "receive [2] torch.int64 from 20",
        f"{took} 0 from rank 20",
        f"{hidden} 0",
        "send [8, 8] to 10",
        "accept [2] torch.int64",
        "release b0",
        "receive [2] torch.int64 from 20",
        f"{took} 1 from rank 20",
        f"{tokens} 0",
        f"{hidden} 1",
        "send [8, 8] to 10",
        "accept [2] torch.int64",
        "release a1",
        f"{tokens} 1",
        f"{tokens} 0",
    ]


def test_a_stage_between_takes_hidden_states_and_sends_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    awaited = "receive [3, 4] torch.bfloat16 from 0"
    came = "receive from 0: generate: rank 10 waited for the hidden states of decode step"
    tokens = [
        "receive [2] torch.int64 from 0",
        "receive from 0: generate: rank 10 waited for the tokens of decode step",
    ]
    sent = "send to 20: generate: rank 10 waited for rank 20 to take the hidden states of decode step"
    assert carried_out(Pipeline(1, 3, monkeypatch), 2) == [
        "admit a0",
        awaited,
        f"{came} 0 from rank 0",
        "forward a0 on [3, 4]",
        "send [1, 2] to 20",
        tokens[0],
        f"{tokens[1]} 0 from rank 0",
        f"{sent} 0",
        "accept [2] torch.int64",
        "release a0",
        "admit a1",
        awaited,
        f"{came} 1 from rank 0",
        "forward a1 on [3, 4]",
        "send [1, 2] to 20",
        tokens[0],
        f"{tokens[1]} 1 from rank 0",
        f"{sent} 1",
        "accept [2] torch.int64",
        "release a1",
    ]


def test_tokens_go_on_up_to_the_last_stage_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the hidden states of their step, and before those of the next."""
    sent = {stage: [line for line in carried_out(Pipeline(stage, 4, monkeypatch), 2) if line.startswith("send [")]
            for stage in range(4)}  # fmt: skip
    assert sent == {
        0: ["send [1, 2] to 10", "send [8, 8] to 10"] * 2,
        1: ["send [1, 2] to 20", "send [8, 8] to 20"] * 2,
        2: ["send [1, 2] to 30"] * 2,
        3: ["send [5, 6] to 0"] * 2,
    }


def test_the_last_stage_sends_tokens_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    came = "receive from 10: generate: rank 20 waited for the hidden states of decode step"
    taken = "send to 0: generate: rank 20 waited for rank 0 to take the tokens of decode step"
    sent = ["send [5, 6] to 0", "accept [2] torch.int64"]
    assert carried_out(Pipeline(2, 3, monkeypatch), 2) == [
        "admit a0",
        "receive [3, 4] torch.bfloat16 from 10",
        f"{came} 0 from rank 10",
        "forward a0 on [3, 4]",
        "draw from [1, 2]",
        *sent,
        "release a0",
        "admit a1",
        "receive [3, 4] torch.bfloat16 from 10",
        f"{came} 1 from rank 10",
        "forward a1 on [3, 4]",
        "draw from [1, 2]",
        f"{taken} 0",
        *sent,
        "release a1",
        f"{taken} 1",
    ]


def test_a_stage_alone_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(name: str) -> list[str]:
        return [f"forward {name} on tokens", "draw from [1, 2]", "accept [2] torch.int64", f"release {name}"]

    log = carried_out(Pipeline(0, 1, monkeypatch), 1, 2)
    assert log == ["admit a0", "admit b0", *step("a0"), *step("b0"), "admit b1", *step("b1")]


def test_a_peer_that_is_gone_is_named_with_what_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"^generate: rank 10 waited for the hidden states of decode step 0 from rank 0 \(deadline 7 s\): gone$"
    with pytest.raises(RunError, match=message):
        carried_out(Pipeline(1, 3, monkeypatch, fails=True), 1)
