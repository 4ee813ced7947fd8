"""What tensor parallelism sends and copies, by the operators that a rank starts; the group answers at once."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from realhf.architecture.compute import Recomputation
from realhf.models.recomputation import run_layer
from realhf.parallel.regions import gather_last_dim, sum_over_group
from realhf.parallel.sequence import TokenShards, enter, gather_outputs, leave
from realhf.parallel.vocabulary import Logits

RANKS = 4
RECOMPUTATIONS: tuple[Recomputation, ...] = ("off", "selective", "full")


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class Operators(TorchDispatchMode):
    """Counts the collectives, and the copies of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = operator._schema.name.split("::")
        if namespace == "c10d" or name in ("clone", "copy_", "cat", "stack"):
            self.counted[name] += 1
        return operator(*args, **(kwargs or {}))


def decode(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return sum_over_group(x, group)


def logits(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return gather_last_dim(x, group)


def statistics(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return Logits(x, torch.ones(5, x.shape[1]), group).of_tokens(torch.zeros(len(x), dtype=torch.int64)).logprob


def sequence_parallel(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    shards = TokenShards(group, RANKS * len(x))
    return gather_outputs(leave(enter(x, group, shards), group, shards), shards)


CASES: dict[Callable[[Tensor, dist.ProcessGroup], Tensor], dict[str, int]] = {
    decode: {"allreduce_": 1},
    logits: {"_allgather_base_": 1, "clone": 1},  # the ranks' columns side by side
    statistics: {"_allgather_base_": 1, "stack": 1},  # the sums of the vocabulary's parts
    sequence_parallel: {"_allgather_base_": 2, "_reduce_scatter_base_": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_copied_for_a_collective(
    group: dist.ProcessGroup, case: Callable[[Tensor, dist.ProcessGroup], Tensor]
) -> None:
    with torch.no_grad(), Operators() as operators:
        case(torch.ones(3, 8), group)
    assert operators.counted == CASES[case]


def test_a_sum_with_gradients_leaves_what_others_keep(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient that autograd gives to two functions, and a product that selective recomputation keeps."""
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: x.mul_(RANKS))
    x = torch.ones(3, 8, requires_grad=True)
    (enter(x, group, None) + x).backward(given := torch.ones(3, 8))
    assert torch.equal(given, torch.ones(3, 8))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3, 8), RANKS + 1.0))

    def layer(x: Tensor) -> Tensor:
        return sum_over_group(x @ weight, group).square()

    gradients = []
    weight = torch.eye(8)
    for recomputation in RECOMPUTATIONS:
        x = torch.ones(3, 8, requires_grad=True)
        run_layer(recomputation, layer, x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(gradients[0], torch.full((3, 8), 2.0 * RANKS))
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
