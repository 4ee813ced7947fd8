"""One rank's parameters in layouts of several: which gradients are summed over which ranks, who needs which unit."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from realhf.architecture.compute import DataParallel
from realhf.architecture.model import DecoderConfig
from realhf.engine.pipeline import no_end
from realhf.engine.train import data_parallel
from realhf.engine.train.data_parallel import NativeParameters, place_of, sum_over
from realhf.engine.train.gathering import Gathering
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.parallel.groups import ParallelGroups
from tests.unit.engine.losses import tiny

CPU = torch.device("cpu")
ONE, TIED = tiny(num_layers=1), tiny(num_layers=2, tied_embeddings=True)


class Group:
    def __init__(self, name: str) -> None:
        self.name = name

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Groups and elements of the sums so far; each adds 1,000."""
    found: list[tuple[str, int]] = []

    def all_reduce(tensor: Tensor, group: Group) -> None:
        found.append((group.name, tensor.numel()))
        tensor += 1000

    monkeypatch.setattr(data_parallel.dist, "all_reduce", all_reduce)
    return found


def parameters(
    config: DecoderConfig, strategy: ParallelStrategy, rank: int = 0, way: DataParallel = "zero1", **groups: Any
) -> NativeParameters:
    devices = strategy.dp * strategy.tp * strategy.pp
    here = ParallelGroups(Layout(DeviceMesh(0, devices), strategy), rank, **groups)
    return NativeParameters(config, here, torch.float32, CPU, way, prefetch=True)


def changed(of: NativeParameters, *, sequence_parallel: bool) -> set[str]:
    """The parameters whose gradients others than the data-parallel ranks add to."""
    of.attach_gradients(torch.float64)
    of.reduce_gradients(sequence_parallel=sequence_parallel)
    names = {box.name for box, at in of._held if (of.gradient[at : at + box.size] == 1000).all()}
    assert (of.gradient != 0).sum() == sum(box.size for box, _ in of._held if box.name in names)
    return names


def test_with_sequence_parallelism_gradients_of_own_tokens_are_summed(
    summed: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_parallel.dist, "get_rank", Group.rank)
    group = Group("tensor")
    divided = ParallelStrategy(tp=2)
    norms = {
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
    }
    assert changed(parameters(ONE, divided, tensor=group), sequence_parallel=True) == norms
    assert summed == [("tensor", 3 * 32)], "one collective for all of them"
    assert changed(parameters(ONE, divided, tensor=group), sequence_parallel=False) == set()
    assert changed(parameters(ONE, ParallelStrategy()), sequence_parallel=True) == set()
    assert len(summed) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_both_copies_of_a_tied_embedding_have_one_gradient(summed: list[tuple[str, int]], rank: int) -> None:
    stages, group = ParallelStrategy(pp=2), Group("tied")
    assert changed(parameters(TIED, stages, rank, tied=group), sequence_parallel=False) == {"model.embed_tokens.weight"}
    assert summed == [("tied", 24 * 32)]
    assert changed(parameters(tiny(num_layers=2), stages, rank, tied=group), sequence_parallel=False) == set()
    assert changed(parameters(TIED, ParallelStrategy()), sequence_parallel=False) == set()


def test_a_sum_over_several_views_is_one_collective(summed: list[tuple[str, int]]) -> None:
    vector = torch.arange(10.0)
    sum_over(Group("all"), [vector[1:3], vector[4:8].view(2, 2)])  # type: ignore[arg-type]
    assert vector.tolist() == [0, 1001, 1002, 3, 1004, 1005, 1006, 1007, 8, 9]
    sum_over(Group("one"), [vector[8:]])  # type: ignore[arg-type]
    sum_over(Group("none"), [])  # type: ignore[arg-type]
    assert vector[8:].tolist() == [1008, 1009]
    assert summed == [("all", 6), ("one", 2)]


def test_the_place_of_what_is_updated_in_what_is_kept() -> None:
    updated = [slice(2, 5), slice(7, 8), slice(10, 14)]
    assert [place_of(at, updated) for at in range(8)] == [2, 3, 4, 7, 10, 11, 12, 13]
    with pytest.raises(AssertionError, match="every box lies in an updated part"):
        place_of(8, updated)


HEAD_IN_SLICES: DataParallel = (("*", "sharded"), ("head", "2 sharded"))


@pytest.mark.parametrize(
    ("config", "strategy", "rank", "way", "expected"),
    [
        (
            ONE,
            ParallelStrategy(dp=2),
            0,
            "fsdp",
            {
                "model.embed_tokens": (["model.embed_tokens"], False),
                "model.layers.0": (["model.layers.0"], True),
                "model.norm": (["model.norm"], False),
            },
        ),
        (
            tiny(num_layers=1, tied_embeddings=True),
            ParallelStrategy(dp=2),
            0,
            "fsdp",
            {
                "model.embed_tokens": (["model.embed_tokens"], False),
                "model.layers.0": (["model.layers.0"], True),
                "model.norm": (["model.norm", "model.embed_tokens"], False),
            },
        ),
        (
            TIED,
            ParallelStrategy(dp=2, pp=2),
            0,
            "fsdp",
            {"model.embed_tokens": (["model.embed_tokens"], False), "model.layers.0": (["model.layers.0"], True)},
        ),
    ],
)
def test_modules_are_connected_with_the_units_that_they_need(
    monkeypatch: pytest.MonkeyPatch,
    config: DecoderConfig,
    strategy: ParallelStrategy,
    rank: int,
    way: DataParallel,
    expected: dict[str, tuple[list[str], bool]],
) -> None:
    """The gradients of an embedding and of the final norm need no values."""
    connected: dict[Any, tuple[list[Any], bool]] = {}

    def connect(_: Gathering, module: nn.Module, needed: list[Any], *, backward: bool) -> None:
        connected[module] = list(needed), backward

    monkeypatch.setattr(Gathering, "connect", connect)
    made = parameters(config, strategy, rank, way, data=Group("data"))
    names = {gathered: unit.name for unit, gathered in made.gathered.items()}
    modules = {module: name for name, module in made.decoder.named_modules()}
    found = {modules[of]: ([names[unit] for unit in needed], backward) for of, (needed, backward) in connected.items()}
    assert found == expected


def test_slices_of_a_head_are_there_for_their_use_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    connected: list[tuple[Any, ...]] = []
    modules: list[nn.Module] = []
    monkeypatch.setattr(Gathering, "connect", lambda self, module, needed, backward: modules.append(module))
    monkeypatch.setattr(
        Gathering, "connect_weight", lambda self, parameter, *units: connected.append((parameter, units))
    )
    of = parameters(ONE, ParallelStrategy(dp=2), 0, HEAD_IN_SLICES, data=Group("data"))
    names = {gathered: unit.module for unit, gathered in of.gathered.items()}
    found = {next(n for n, p in of.parameters.items() if p is parameter): units for parameter, units in connected}
    assert {name: [names[unit] for unit in units] for name, units in found.items()} == {
        "lm_head.slices.0.weight": ["lm_head.slices.0"],
        "lm_head.slices.1.weight": ["lm_head.slices.1"],
    }
    assert len(modules) == len(of.gathered) - 2, "the others as modules"


def test_what_is_gathered_is_there_within_a_pass_and_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gathering, "computing", lambda self: "computing")
    monkeypatch.setattr(Gathering, "whole", lambda self: "whole")
    of = parameters(ONE, ParallelStrategy(dp=2), 0, "fsdp", data=Group("data"))
    assert (of.computing(), of.whole()) == ("computing", "whole")


def test_each_rank_holds_its_shards_from_the_first_element_on() -> None:
    """Every element of every parameter is held by one of two ranks, or by one after the other."""
    held: dict[str, list[Any]] = {}
    for rank in range(2):
        of = parameters(ONE, ParallelStrategy(dp=2), rank, "fsdp", data=Group("data"))
        places = sorted((at, at + box.size) for box, at in of._held)
        assert places[0][0] == 0
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
        assert places[-1][1] <= len(of.flat)
        for box, tensor in of.held():
            assert tensor.shape == box.shape
            held.setdefault(box.name, []).append(box)
    whole = {
        name: parameter.numel() for name, parameter in parameters(ONE, ParallelStrategy()).decoder.named_parameters()
    }
    assert {name: sum(box.size for box in boxes) for name, boxes in held.items()} == whole


def test_gradients_are_completed_unit_by_unit_before_and_after_those_of_other_ranks(
    summed: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = parameters(TIED, ParallelStrategy(pp=2), tied=Group("tied"))
    of.attach_gradients(torch.float32)
    for name in ("reduce_gathered", "reduce_others", "publish", "zero_gradients"):
        monkeypatch.setattr(of, name, lambda name=name: summed.append((name, 0)))
    of.reduce_gradients(sequence_parallel=False)
    of.publish()
    of.zero_gradients()
    names = ["reduce_gathered", "tied", "reduce_others", "publish", "zero_gradients"]
    assert [name for name, _ in summed] == names


def test_without_shards_everything_is_there_at_all_times() -> None:
    of = parameters(ONE, ParallelStrategy())
    with of.computing() as end_pass, of.whole():
        assert end_pass is no_end
    held = {box.name: tensor for box, tensor in of.held()}
    of.flat.normal_()
    for name, parameter in of.decoder.named_parameters():
        assert torch.equal(held[name], parameter)
    assert of.data_parallel == "zero1"
