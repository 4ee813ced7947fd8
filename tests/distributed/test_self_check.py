"""What the doctor has GPUs do, done by four processes over gloo; and that it sees what is wrong."""

import pytest
import torch
import torch.distributed as dist

from realhf.architecture.decoding import GraphLife
from realhf.engine.generate import decode_graphs
from realhf.models.decoder import Decoder
from realhf.profiling import self_check
from realhf.realloc.execute.executor import Reallocation, execute
from tests.distributed.pool import run_distributed
from tests.unit.engine.captures import Compute, EagerCapture

pytestmark = pytest.mark.distributed
CPU = torch.device("cpu")


def all_checks(rank: int) -> dict[str, str]:
    return {name: check(rank, 4, CPU) for name, check in self_check.CHECKS.items()}


@pytest.mark.slow
def test_four_ranks_pass() -> None:
    first, *others = run_distributed(all_checks, 4)
    assert all(other == first for other in others)
    assert first["groups"].startswith("all-reduce between 4 processes")
    assert first["reallocation"].startswith("dp4 tp1 pp1 -> dp1 tp4 pp1 -> dp1 tp1 pp4 -> dp1 tp2 pp2 -> dp4")
    text = "none recorded: a CPU has no graphs (tp 2; float64 in pages of 16, bfloat16 in pages of 16 tokens)"
    assert first["generation"] == text


def broken(rank: int, check: str) -> str:
    """The check where one rank's device computes wrong sums, or a reallocation loses a value."""

    def wrong_sum(numbers: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
        numbers.add_(7)

    def losing(part: Reallocation) -> None:
        execute(part)
        part.target[0][1].view(-1)[0] += 1

    if check == "groups":
        self_check.dist.all_reduce = wrong_sum
    else:
        self_check.execute, self_check.verify = losing, lambda *_, **__: None
    try:
        self_check.CHECKS[check](rank, 2, CPU)
    except ArithmeticError as error:
        return str(error)
    return "nothing was seen"


@pytest.mark.parametrize(
    ("check", "message"), [("groups", "the all-reduce of"), ("reallocation", "came wrong from dp2 tp1 pp1")]
)
def test_what_is_wrong_is_seen(check: str, message: str) -> None:
    assert all(message in found for found in run_distributed(broken, 2, check))


class Rescaled(EagerCapture):
    """In bfloat16, where it is wrong, its graphs give twice the logits."""

    def __init__(self, decoder: Decoder, wrong: bool):
        super().__init__()
        self.dtype, self.norm = next(decoder.parameters()).dtype, decoder.model.norm.weight.data
        self.factor = 2 if wrong and self.dtype == torch.bfloat16 else 1

    def recorded(self, compute: Compute) -> Compute:
        def rescaled() -> None:
            self.norm.mul_(self.factor)
            compute()
            self.norm.div_(self.factor)

        return rescaled


def replaying(rank: int, wrong: bool) -> tuple[str, set[torch.dtype]]:
    """The check of graphs with stand-ins for them, and the dtypes that it has replayed."""
    captures: list[Rescaled] = []

    def capture(decoder: Decoder, graphs: GraphLife) -> Rescaled | None:
        if graphs == "off":
            return None
        captures.append(Rescaled(decoder, wrong))
        return captures[-1]

    decode_graphs.capture_of = capture
    self_check.graphs_refusal = lambda config, on_gpu: None
    try:
        found = self_check.check_generation(rank, 2, CPU)
    except ArithmeticError as error:
        found = str(error)
    return found, {capture.dtype for capture in captures if capture.replays}


@pytest.mark.slow
def test_graphs_are_checked_by_the_kernels_and_in_the_dtype_of_generation() -> None:
    for found, dtypes in run_distributed(replaying, 2, False):
        assert found.startswith("recorded, replayed, and as kernel by kernel (tp 2")
        assert dtypes == {torch.float64, torch.bfloat16}
    first, _ = run_distributed(replaying, 2, True)
    assert first[0] == "graphs just recorded gave other log-probabilities in torch.bfloat16 than kernel by kernel"
