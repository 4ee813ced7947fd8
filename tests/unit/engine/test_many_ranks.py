"""Single ranks of large models on many devices, whose process groups answer at once.

torch's "fake" process group takes every rank of any world in one process. For sizes the tensors of a model of 70
billion parameters are on `meta`, without memory. Whom a rank speaks to depends on no width, so for communicators the
model is narrow, and a step runs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from realhf.api.experiment import OptimizerConfig
from realhf.api.generation import GenerationOptions
from realhf.architecture.compute import Computation
from realhf.architecture.named import LLAMA
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, ModelInterfaceType
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.interface import GenerationRequest, Stats
from realhf.engine.model import ShardedModel
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.parallel import collectives
from realhf.parallel.groups import GroupTable
from realhf.parallel.vocabulary import Logits
from realhf.planning.model.communicators import Key, axes_used, group_key
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.features import ENGINE
from realhf.planning.model.memory import PlacedModel
from tests.unit.api.calls import call
from tests.unit.engine.fake_ranks import as_rank

WORLD = 128
NARROW = replace(
    LLAMA["llama70b"], hidden_size=64, intermediate_size=64, num_layers=16, vocab_size=64, attention_head_dim=2
)
TIED = replace(NARROW, tied_embeddings=True)
Calls = Sequence[tuple[ModelInterfaceType, Layout]]


def static_bytes(layout: Layout, rank: int) -> int:
    """Parameters, gradient and optimizer states that the engine makes on a rank."""
    compute = Computation(recomputation="full", sequence_parallel=True)
    with as_rank(rank, WORLD):
        groups = GroupTable([layout], rank).groups(layout)
        spec = ModelSpec(
            LLAMA["llama70b"], groups, torch.bfloat16, "meta", optimizer=OptimizerConfig(), compute=compute
        )
        model = ShardedModel(spec)
    assert model.trainer is not None
    states = model.trainer.optimizer.state.values()
    return sum(x.nbytes for x in (model.parameters.flat, model.parameters.gradient, *states) if x is not None)


@pytest.mark.parametrize(
    "strategy", [ParallelStrategy(4, 8, 4), ParallelStrategy(2, 8, 8), ParallelStrategy(16, 8, 1)], ids=str
)
def test_the_planner_counts_what_the_largest_stage_holds(strategy: ParallelStrategy) -> None:
    """To the byte. A stage between the first and the last has no embedding."""
    layout = Layout(DeviceMesh(0, WORLD), strategy)
    features = replace(ENGINE.on(load_hardware("h100")), recomputation="full", sequence_parallel=True)
    planned = PlacedModel(LLAMA["llama70b"], strategy, "bfloat16", features).static_bytes(trained=True)
    firsts = [layout.device(0, 0, stage) for stage in range(strategy.pp)]
    first, *between, last = (static_bytes(layout, rank) for rank in (*firsts, WORLD - 1))
    assert max(first, last, *between) == planned
    assert len(set(between[:-1])) <= 1
    assert first == pytest.approx(last, rel=1e-5)


class Communicators(TorchDispatchMode):
    """Notes what NCCL would make communicators of: groups with collectives, and pairs of ranks that send to each other
    outside of a batch of messages (`ProcessGroupNCCL::pointToPoint`). What is received is zeros."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.used = rank, set[tuple[str, tuple[int, ...]]]()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.namespace == "c10d":
            [group] = [dist.ProcessGroup.unbox(each) for each in args if isinstance(each, torch.ScriptObject)
                       and "ProcessGroup" in str(each._type())]  # fmt: skip
            ranks, name = tuple(dist.get_process_group_ranks(group)), operator._schema.name.removeprefix("c10d::")
            if name in ("send", "recv_"):
                self.used.add(("pair", tuple(sorted((self.rank, ranks[args[2]])))))
            else:
                self.used.add(("group", ranks))
            if name not in ("send", "broadcast_", "allreduce_", "barrier"):  # all that may come into fresh memory
                for tensor in tree_leaves(args[0]):
                    tensor.zero_()
        return operator(*args, **(kwargs or {}))


def loss(output: Logits, batch: Batch) -> tuple[torch.Tensor, Stats]:
    return -output.of_tokens(torch.cat(batch.data["tokens"])).logprob.sum(), {}


def carried_out(model: ShardedModel, kind: ModelInterfaceType) -> None:
    batch = Batch(tuple(range(8)), {"tokens": [torch.zeros(4, dtype=torch.int64)] * 8})
    if kind == GENERATE:
        options = GenerationOptions(max_new_tokens=2, eos_token=-1)
        model.generate(batch, GenerationRequest(options, prompt_key="tokens", sample_key=(0, 0)))
    elif kind == INFERENCE:
        model.forward(batch, "tokens", lambda output, part: {}, micro_batches=2)
    else:
        model.train_step(batch, "tokens", loss, lambda part: 1.0, 2)


def used(rank: int, world: int, calls: Calls, config: Any = NARROW) -> set[tuple[str, tuple[int, ...]]]:
    """The communicators of a rank by the engine's own calls, each on a model of its own."""
    with as_rank(rank, world), Communicators(rank) as communicators:
        table = GroupTable([layout for _, layout in calls], rank)
        for kind, layout in calls:
            if rank in layout.mesh.devices:
                trained = OptimizerConfig() if kind == TRAIN_STEP else None
                spec = ModelSpec(config, table.groups(layout), torch.float32, "cpu", optimizer=trained)
                carried_out(ShardedModel(spec), kind)
    return communicators.used


def planned(rank: int, calls: Calls, config: Any = NARROW) -> set[Key]:
    """The communicators of a device that the planner counts for the calls."""
    found = set[Key]()
    for kind, layout in calls:
        if rank in layout.mesh.devices:
            axes = axes_used(call("m", kind, model_type=config), layout.strategy, gathers_parameters=False)
            found.update(group_key(layout, axis) for axis in axes)
    return found


@pytest.fixture
def as_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collectives of NCCL, which has more of them than gloo."""
    monkeypatch.setattr(collectives, "HAS_BOTH", (*collectives.HAS_BOTH, "fake"))


@pytest.mark.usefixtures("as_nccl")
@pytest.mark.parametrize(
    "strategy", [ParallelStrategy(4, 8, 4), ParallelStrategy(2, 8, 8), ParallelStrategy(16, 8, 1)], ids=str
)
def test_the_planner_counts_the_communicators_of_every_stage(strategy: ParallelStrategy) -> None:
    """For rollouts and training. Where an embedding is tied, it counts one of both ends for the stages between too;
    where nothing closes the ring of stages, it counts both pairs for the ends too."""
    layout = Layout(DeviceMesh(0, WORLD), strategy)
    both: Calls = [(GENERATE, layout), (TRAIN_STEP, layout)]
    for stage in range(strategy.pp):
        rank, is_end = layout.device(1, 1, stage), stage in (0, strategy.pp - 1)
        assert len(used(rank, WORLD, both)) == len(planned(rank, both))
        assert len(used(rank, WORLD, both, TIED)) + (not is_end) == len(planned(rank, both, TIED))
        is_open = strategy.pp > 2 and is_end
        assert len(used(rank, WORLD, both[1:])) + is_open == len(planned(rank, both[1:]))


@pytest.mark.usefixtures("as_nccl")
def test_groups_of_six_layouts_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """By layouts that divide 64 devices alike: each set of ranks has one group, and one communicator where a call uses
    it. Pairs are at most those that count: two where there is a third stage. Fewer are used where pipelines of two
    lengths have the same pair, and at the ends of a pipeline that generates nothing."""
    made: list[tuple[int, ...]] = []
    new_group = dist.new_group

    def counting(ranks: list[int], *more: Any) -> dist.ProcessGroup:
        made.append(tuple(ranks))
        return new_group(ranks, *more)

    monkeypatch.setattr(dist, "new_group", counting)
    whole, left, right = DeviceMesh(0, 64), DeviceMesh(0, 32), DeviceMesh(32, 32)
    calls: Calls = [
        (TRAIN_STEP, Layout(whole, ParallelStrategy(8, 8, 1))),
        (TRAIN_STEP, Layout(whole, ParallelStrategy(2, 8, 4))),
        (INFERENCE, Layout(whole, ParallelStrategy(4, 4, 4))),
        (GENERATE, Layout(whole, ParallelStrategy(8, 1, 8))),
        (TRAIN_STEP, Layout(left, ParallelStrategy(4, 2, 4))),
        (INFERENCE, Layout(right, ParallelStrategy(16, 2, 1))),
    ]
    for rank, pairs, counted_pairs in ((0, 3, 6), (21, 4, 6), (31, 4, 6), (42, 4, 4), (63, 3, 4)):
        made.clear()
        found, counted = used(rank, 64, calls), planned(rank, calls)
        assert len(made) == len(set(made)) == 157
        assert sum(kind == "pair" for kind, _ in found) == pairs
        assert sum(axis != "" for axis, *_ in counted) == counted_pairs
        assert len(found) - pairs == len(counted) - counted_pairs
