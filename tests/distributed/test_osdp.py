"""`realhf.osdp`: five AdamW steps of a torch module in all mixes of modes against one process, and what is gathered at
a time (OSDP, IJCAI 2023)."""

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import realhf
from realhf.architecture.compute import MODES, ModeRules, modes_text
from realhf.base.errors import UserError
from realhf.engine.train.gathering import GatheredUnit
from realhf.planning.model.hardware import GIB
from realhf.planning.model.osdp.collective_costs import CollectiveCost, CollectiveCosts
from realhf.wrapping.handling import handling_seconds
from tests.distributed.pool import run_distributed

pytestmark = pytest.mark.distributed

VOCABULARY, HIDDEN, INNER, LAYERS, LENGTH = 48, 16, 40, 2, 6
SAMPLES, STEPS, MAX_NORM = 8, 5, 0.5
COST = CollectiveCost(latency_s=1e-4, seconds_per_byte=1e-9)
COSTS = CollectiveCosts(all_reduce=COST, all_gather=COST, reduce_scatter=COST)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Linears, embeddings and norms, a parameter of no such module, and a buffer."""

    scale: Tensor

    def __init__(self, *, tied: bool = False, recompute: str = "off") -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(LENGTH, HIDDEN))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.positions  # [samples, length, hidden]
        for layer in self.layers:
            if self.recompute == "off":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
        return self.head(x)


@dataclass(frozen=True)
class Case:
    modes: str | ModeRules
    tied: bool = False
    recompute: str = "off"
    prefetch: bool = True
    passes: int = 1  # backward passes before a step
    frozen: bool = False  # a layer is not trained


@dataclass
class Outcome:
    norms: list[float]
    state: dict[str, np.ndarray]
    is_exact: bool
    gathered: list[int] = field(default_factory=list)  # bytes, after each start of a gather


PROJECTIONS = [f"layers.{n}.{kind}" for n in range(LAYERS) for kind in ("up", "down")]
OPERATORS = {"embed": 8, "head": 8, "others": 1, **dict.fromkeys(PROJECTIONS, 8)}  # the most slices of each


def mixed(seed: int) -> ModeRules:
    """A random mode for every operator and slice."""
    draw, rules = random.Random(seed), []
    for name, most in OPERATORS.items():
        modes = MODES if most > 1 else ("replicated", "zero1")
        count = draw.choice([n for n in (1, 2, 4, 8) if n <= most])
        rules.append((name, modes_text([draw.choice(modes) for _ in range(count)])))
    return tuple(rules)


DEFAULT = {
    "all replicated": Case("replicated"),
    "all zero1, two passes": Case("zero1", passes=2),
    "all sharded": Case("sharded"),
    "all sharded, two passes": Case("sharded", passes=2, prefetch=False),
    "2 slices, recomputed": Case("2 sharded", recompute="on"),
    "4 slices": Case("4 sharded", prefetch=False),
    "8 slices, recomputed by a backward pass within": Case("8 sharded", recompute="reentrant"),
    "mixed": Case(mixed(1)),
    "mixed, recomputed, two passes": Case(mixed(2), recompute="on", passes=2),
    "tied": Case("sharded", tied=True),
    "a layer is frozen": Case("2 sharded", frozen=True),
}
SLOW = {
    f"mixed {seed}": Case(
        mixed(seed),
        recompute=("off", "on", "reentrant")[seed % 3],
        prefetch=seed % 2 == 0,
        passes=1 + seed % 2,
    )
    for seed in range(10, 22)
}


def net(case: Case) -> Net:
    torch.manual_seed(3)
    made = Net(tied=case.tied, recompute=case.recompute).double()
    if case.frozen:
        made.layers[0].requires_grad_(False)
    return made


def adamw(vectors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(vectors, lr=1e-2, weight_decay=0.1)


def batch(step: int) -> Tensor:
    """Tokens [samples, length] of all ranks."""
    return torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))


def loss_of(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, dims=1).flatten())


def wrapped(model: nn.Module, ranks: int, **options: Any) -> Any:
    given = {"memory_gb": 1.0, "batch_size": 2, **options}
    with not_measured():
        return realhf.osdp(
            model,
            adamw,
            init_device_mesh("cpu", (ranks,)),
            example=lambda samples: loss_of(model, batch(0)[:1].expand(samples, -1)),
            **given,
        )


@contextmanager
def not_measured() -> Iterator[None]:
    """Within it collectives have given costs: measuring them takes a second."""
    with (
        mock.patch("realhf.wrapping.osdp.measure_collectives", return_value=COSTS),
        mock.patch("realhf.wrapping.osdp.handling_seconds", return_value=0.0),
        mock.patch("realhf.wrapping.osdp.measure_overlap", return_value=0.0),
    ):
        yield


def run_all(rank: int, ranks: int, cases: dict[str, Case]) -> dict[str, Outcome]:
    return {name: trained(case, rank, ranks) for name, case in cases.items()}


def trained(case: Case, rank: int, ranks: int, **limit: Any) -> Outcome:
    model = wrapped(net(case), ranks, modes=case.modes, prefetch=case.prefetch, **limit)
    norms = []
    for step in range(STEPS):
        tokens = batch(step).chunk(ranks)[rank]
        for part in tokens.chunk(case.passes):
            (loss_of(model, part) / case.passes).backward()
            with torch.no_grad():  # what is gathered for it must not be there after the step
                model.eval()(tokens)
            model.train()
        norms.append(model.step(MAX_NORM))
    state = model.state_dict()
    with torch.no_grad():
        before = model(batch(0))
        model.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in state.items()})
        assert not any(tensor.any() for tensor in model.state_dict().values())
        model.load_state_dict(state)
        is_exact = torch.equal(model(batch(0)), before)
    again = model.state_dict()
    is_exact &= state.keys() == again.keys() and all(torch.equal(state[name], again[name]) for name in state)
    fresh = net(case)
    fresh.load_state_dict(state)  # by its names, all of them
    torch.testing.assert_close(fresh(batch(0)), before, rtol=1e-12, atol=1e-12)
    return Outcome(norms, {name: tensor.numpy() for name, tensor in state.items()}, is_exact)


def alone(case: Case) -> Outcome:
    """torch itself, in one process."""
    model = net(Case("replicated", tied=case.tied, frozen=case.frozen))
    optimizer, norms = adamw(list(model.parameters())), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return Outcome(norms, {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}, True)


def check(case: Case, outcomes: list[Outcome]) -> None:
    expected = alone(case)
    assert min(expected.norms) > MAX_NORM, "clipping must do something"
    size = np.sqrt(sum((array**2).sum() for array in expected.state.values()))
    for outcome in outcomes:
        np.testing.assert_allclose(outcome.norms, expected.norms, rtol=1e-9)
        assert list(outcome.state) == list(expected.state)
        wrong = sum(((outcome.state[name] - array) ** 2).sum() for name, array in expected.state.items())
        assert np.sqrt(wrong) < 1e-7 * size
        assert outcome.is_exact


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Outcome]]:
    return run_distributed(run_all, 2, 2, DEFAULT)


@pytest.mark.parametrize("name", DEFAULT)
def test_five_steps_are_those_of_one_process(name: str, two_ranks: list[dict[str, Outcome]]) -> None:
    check(DEFAULT[name], [rank[name] for rank in two_ranks])


@pytest.mark.slow
def test_five_steps_of_four_ranks() -> None:
    cases = {name: DEFAULT[name] for name in ("8 slices, recomputed by a backward pass within", "mixed")}
    outcomes = run_distributed(run_all, 4, 4, cases)
    for name, case in cases.items():
        check(case, [rank[name] for rank in outcomes])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_five_steps_of_random_mixes(ranks: int) -> None:
    outcomes = run_distributed(run_all, ranks, ranks, SLOW)
    for name, case in SLOW.items():
        check(case, [rank[name] for rank in outcomes])


def recomputed(rank: int) -> tuple[tuple[str, ...], int, Outcome]:
    """With a byte less than nothing recomputed needs: the blocks, forward passes of the first, and five steps."""
    case = Case("2 sharded")
    plain = wrapped(net(case), 2, modes=case.modes, recompute=True)
    assert plain.plan.recomputed == ()
    limit = {"memory_gb": (plain.plan.memory_bytes - 1) / GIB, "recompute": True}
    model = net(case)
    kept = wrapped(model, 2, modes=case.modes, **limit)
    assert kept.plan.memory_bytes < plain.plan.memory_bytes
    passes = []
    model.layers[0].norm.register_forward_hook(lambda *_: passes.append(1))
    loss_of(kept, batch(0)[:2]).backward()
    kept.zero_grad()
    return kept.plan.recomputed, len(passes), trained(case, rank, 2, **limit)


def test_blocks_that_are_chosen_run_again() -> None:
    for blocks, passes, outcome in run_distributed(recomputed, 2):
        assert blocks[0] == "layers.0"
        assert passes == 2
        check(Case("2 sharded"), [outcome])


SLICES = (1, 2, 4, 8)


def gathered_at_a_time(rank: int) -> dict[tuple[int, bool], tuple[int, int]]:
    """By slices and prefetch, the bytes of a wide operator, and the most that was gathered at a time."""
    found = {}
    for slices in SLICES:
        for prefetch in (False, True):
            torch.manual_seed(0)
            wide = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 512), nn.Linear(512, 8))
            inputs, originals = torch.randn(4, 8), [weakref.ref(parameter) for parameter in wide.parameters()]
            with not_measured():
                model = realhf.osdp(
                    wide,
                    adamw,
                    init_device_mesh("cpu", (2,)),
                    memory_gb=1,
                    example=lambda samples, wide=wide, inputs=inputs: wide(inputs[:samples]).square().mean(),
                    batch_size=4,
                    modes=(("*", "zero1"), ("1", f"{slices} sharded")),
                    prefetch=prefetch,
                )
            assert not any(original() is not None for original in originals), "their memory is free"
            units = list(model._vectors.gathered.values())
            most, start = 0, GatheredUnit.start_gather

            def gather(unit: GatheredUnit, *args: Any, units: list[Any] = units, start: Any = start) -> None:
                nonlocal most
                start(unit, *args)
                most = max(most, sum(other.arena.flat.untyped_storage().nbytes() for other in units))

            with mock.patch.object(GatheredUnit, "start_gather", gather):
                for _ in range(2):  # the first pass finds what follows what
                    model(inputs).square().mean().backward()
                    model.step()
            found[slices, prefetch] = 512 * 512 * 4, most
    return found


def test_slices_are_gathered_one_or_two_at_a_time() -> None:
    for rank in run_distributed(gathered_at_a_time, 2):
        for (slices, prefetch), (size, most) in rank.items():
            expected = size / slices * (2 if prefetch and slices > 1 else 1)
            assert abs(most / expected - 1) <= 0.1, (slices, prefetch, most, expected)


def left_of_a_destroyed_group(rank: int) -> tuple[int, str]:
    """How many threads a module that is still there has kept of its group, and what a step then raises."""

    def threads() -> dict[str, str]:
        return {path.parent.name: path.read_text() for path in Path("/proc/self/task").glob("*/comm")}

    def of_group() -> int:  # threads by number: one that has just begun has not taken its name yet
        return sum("gloo" in name for number, name in threads().items() if number not in before)

    before, model = threads(), net(Case(""))
    kept = wrapped(model, 2)
    loss_of(kept, batch(0)[:2]).backward()
    kept.step()
    assert of_group()
    dist.destroy_process_group(kept._vectors.group)  # as one without arguments destroys all
    gc.collect()  # the stand-ins of `not_measured` keep what they were called with
    with pytest.raises(RuntimeError) as raised:
        kept.step(max_norm=1.0)
    return of_group(), str(raised.value)


def test_a_module_does_not_keep_a_destroyed_group() -> None:
    """Whose threads would still let go of tensors when the interpreter ends, and abort the process."""
    for left, message in run_distributed(left_of_a_destroyed_group, 2):
        assert left == 0
        assert "the process group is destroyed" in message


def chosen(rank: int) -> tuple[str, ...]:
    """What a rank that has too little is told; the plan that just fits, and its prediction."""
    case = Case("")
    try:
        wrapped(net(case), 2, memory_gb=1e-5)
    except UserError as error:
        refused = str(error)
    smallest = int(refused.partition("that does is ")[2].partition(" bytes")[0])
    just = wrapped(net(case), 2, memory_gb=smallest / GIB)
    loss_of(just, batch(0)[:2]).backward()
    just.step()
    free = wrapped(net(case), 2, batch_size=None, max_batch=16)
    assert free.plan.batch_size == 16
    first_ranks_parameters(rank)
    given = wrapped(net(case), 2, modes=just.plan.modes)
    assert given.plan.modes == just.plan.modes
    texts = (just.plan.modes, just.plan, free.plan.modes, smallest, just.plan.memory_bytes)
    return refused, *map(str, texts)


def first_ranks_parameters(rank: int) -> None:
    """Ranks that were seeded differently begin with what the first one has, in every mode, buffers too."""
    for modes in ("replicated", "zero1", "2 sharded"):
        made = []
        for seed in (0, rank):
            torch.manual_seed(100 + seed)
            made.append(Net().double())
            made[-1].scale.fill_(0.5 + seed)
        expected, own = made[0].state_dict(), made[1]
        assert torch.equal(own.positions, expected["positions"]) == (rank == 0)
        found = wrapped(own, 2, modes=modes).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), modes


def test_the_choice_is_that_of_all_ranks() -> None:
    first, second = run_distributed(chosen, 2)
    assert first == second
    refused, just, table, free, smallest, memory = first
    assert "holds no choice of modes" in refused
    assert "sharded" in just
    assert "sharded" not in free
    assert memory == smallest
    assert "all sharded" in table
    assert max(map(len, table.splitlines())) <= 100


def handled(rank: int) -> list[float]:
    """Seconds of handling where a step with sharded operators takes 0.96 s more, and where it takes no longer."""
    group, found = dist.group.WORLD, []
    for sharded_s in (1.0 + 0.96 * (1 + rank), 1.0):
        left = [*[1.0] * 7, *[sharded_s] * 7]
        with mock.patch("realhf.wrapping.handling.seconds_of", lambda work, device: work() or left.pop(0)):  # noqa: B023
            found.append(handling_seconds(group, torch.device("cpu"), torch.float32, COSTS))
    return found


def test_handling_of_slices_by_hand() -> None:
    # 16 operators with three uses each: the slowest rank takes 1.92 s more. What collectives of 4 KiB cost is known.
    first, second = run_distributed(handled, 2)
    assert first == second == [pytest.approx(1.92 / 48 - (1e-4 + 4096e-9)), 0.0]


def refusals(rank: int) -> list[str]:
    texts = []
    for options in ({"modes": (("layers.9.up", "sharded"),)}, {"modes": (("others", "sharded"),)}, {"slices": 0}):
        with pytest.raises(UserError) as refused:
            wrapped(net(Case("")), 2, **options)
        texts.append(str(refused.value))
    mixed_dtypes, square = net(Case("")), init_device_mesh("cpu", (1, 2))
    mixed_dtypes.head.float()
    with pytest.raises(UserError, match=r"float32 on cpu and torch.float64 on cpu: they must be of one dtype"):
        wrapped(mixed_dtypes, 2)
    with pytest.raises(UserError, match="device_mesh has 2 dimensions"):
        realhf.osdp(net(Case("")), adamw, square, memory_gb=1, example=lambda samples: torch.zeros(()))
    other = net(Case(""))
    other.layers = other.layers[: 1 + rank]
    with pytest.raises(UserError, match="other parameters on other ranks"):
        wrapped(other, 2)
    model = wrapped(net(Case("")), 2, modes="replicated")
    with pytest.raises(UserError, match=r"lacks \['positions'"):
        model.load_state_dict({})
    loss_of(model, batch(0)[:2]).backward()
    model.module.zero_grad()  # not the wrapping's
    with pytest.raises(RuntimeError, match=r"use zero_grad\(\)"):
        model.step()
    model = wrapped(net(Case("")), 2, modes="sharded")
    before = model.state_dict()
    for factor in (float("inf"), 1e200):  # gradients that are not finite, and finite ones whose norm is not
        (loss_of(model, batch(0)[:2]) * factor).backward()
        with pytest.raises(FloatingPointError):
            model.step(1.0)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert not model.optimizer.state
    return texts


def test_what_cannot_be_is_refused() -> None:
    unknown, others, slices = run_distributed(refusals, 2)[0]
    assert "'layers.9.up' names no operator" in unknown
    assert "'others' can be replicated, zero1" in others
    assert "slices 0" in slices
