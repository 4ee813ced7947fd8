"""Ranks whose passes reach other parts of a model than their peers': the gradient is still that of one process.

A rank may have no token in the loss, a loss that does not depend on the model, no row at an expert, an operator that
its forward pass skips, or a layer that is not trained. Memory that nothing has written is NaN on these ranks.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import realhf
from realhf.architecture.compute import Computation
from realhf.architecture.model import DecoderConfig, Experts
from realhf.engine.batch import Batch
from realhf.engine.interface import Stats
from realhf.engine.train.gathering import GatheredUnit, Gathering
from realhf.geometry.boxes import Box
from realhf.geometry.shards import FlatLayout
from realhf.parallel.gradients import gradient_sink
from realhf.parallel.groups import GroupTable, ParallelGroups
from realhf.parallel.vocabulary import Logits
from tests.distributed.pool import run_distributed
from tests.distributed.test_operator_modes import mixed
from tests.distributed.test_osdp import not_measured
from tests.distributed.test_training_compute import Case, built
from tests.unit.engine.losses import ONE_RANK, next_token_loss, targets, tiny, trained_tokens, value_loss

pytestmark = pytest.mark.distributed

WORLD_SIZE, STEPS = 4, 2
TWO, EXPERTS = tiny(num_layers=2), tiny(num_layers=2, experts=Experts(count=4, per_token=1))
SHARDED = (("*", "sharded"),)
LOSSES = ("terms", "a constant", "no head")  # of a micro-batch without a token in the loss


@dataclass(frozen=True, kw_only=True)
class Uneven(Case):
    """in_loss: of each sample, whether its tokens are in the loss. `empty`: how the loss of none is computed.
    `alike`: the tokens of a sample are all the same one, so that most experts get no token."""

    in_loss: tuple[int, ...] = (1, 1, 1, 1, 0, 0, 0, 0)
    empty: str = "terms"
    alike: bool = False

    @property
    def uneven_batch(self) -> Batch:
        given = self.batch
        tokens = given.data["tokens"]
        if self.alike:
            tokens = [torch.full_like(sample, 3 * place % 24) for place, sample in enumerate(tokens)]
        masks = [
            torch.full_like(sample, bool(is_in), dtype=torch.bool)
            for sample, is_in in zip(tokens, self.in_loss, strict=True)
        ]
        return given.with_data(tokens=tokens, in_loss=masks)

    def loss(self, output: Any, batch: Batch) -> tuple[Tensor, Stats]:
        if not targets(batch)[1].any():
            if self.empty == "a constant":
                return torch.zeros((), dtype=torch.float64, requires_grad=True), {}
            if self.empty == "no head":
                return 0.0 * (output.hidden if isinstance(output, Logits) else output).sum(), {}
        return (value_loss if self.config.head == "scalar" else next_token_loss)(output, batch)


def way(data_parallel: Any, **changes: Any) -> Computation:
    return Computation(data_parallel=data_parallel, **changes)


DEFAULT = {
    "a rank without a token": Uneven(dp=2, config=TWO, compute=way("fsdp")),
    "a rank with a constant for a loss, one unit at a time": Uneven(
        dp=2, config=TWO, compute=way("fsdp", prefetch=False), empty="a constant", micro_batches=1
    ),
    "a rank that does not come to its head, in slices": Uneven(
        dp=2, config=TWO, compute=way((*SHARDED, ("*", "3 sharded"))), empty="no head"
    ),
    "a micro-batch with a constant, recomputed, dp2 tp2": Uneven(
        dp=2,
        tp=2,
        config=TWO,
        compute=way("fsdp", recomputation="full", sequence_parallel=True),
        in_loss=(1, 0, 1, 1, 0, 0, 0, 1),
        empty="a constant",
        micro_batches=4,
    ),
    "micro-batches with a constant, dp2 pp2": Uneven(
        dp=2, pp=2, config=TWO, compute=way(SHARDED), in_loss=(0, 0, 0, 0, 1, 0, 0, 1), empty="a constant",
        micro_batches=4,
    ),
    "a tied head that one rank uses, dp2 pp2": Uneven(
        dp=2, pp=2, config=replace(TWO, tied_embeddings=True), compute=way("fsdp"), empty="no head", micro_batches=2
    ),
    "a critic without a target, dp4": Uneven(
        dp=4, config=replace(TWO, head="scalar"), compute=way("fsdp"), in_loss=(0, 0, 0, 0, 0, 0, 1, 0)
    ),
    "experts without a token": Uneven(dp=2, config=EXPERTS, compute=way(SHARDED), alike=True, in_loss=(1,) * 8),
}  # fmt: skip


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass
class Outcome:
    norms: list[float]
    parameters: list[tuple[Box, np.ndarray]]


def run_all(rank: int, cases: dict[str, Uneven]) -> dict[str, Outcome]:
    table = GroupTable([case.layout for case in cases.values()], rank)
    with nan_in_new_memory():
        return {
            name: trained(case, table.groups(case.layout))
            for name, case in cases.items()
            if rank in case.layout.mesh.devices
        }


def trained(case: Uneven, groups: ParallelGroups) -> Outcome:
    model = built(case.config, groups, case.compute)
    batch = case.uneven_batch.split(groups.layout.strategy.dp)[groups.dp_index]
    norms = []
    for _ in range(STEPS):
        stats = model.train_step(batch, "tokens", case.loss, trained_tokens, case.micro_batches)
        norms += [stats["grad_norm"][0]] if stats else []
    return Outcome(norms, [(box, local.numpy().copy()) for box, local in model.residency.held()])


def check(case: Uneven, outcomes: list[Outcome]) -> None:
    """`outcomes` of the layout's ranks, against one process that computes all samples in one micro-batch."""
    alone = trained(replace(case, compute=Computation(), micro_batches=1), ONE_RANK)
    before = {box.name: local for box, local in built(case.config, ONE_RANK, Computation()).residency.held()}
    for outcome in outcomes:
        np.testing.assert_allclose(outcome.norms, alone.norms[: len(outcome.norms)], rtol=1e-9)
    expected = {box.name: array for box, array in alone.parameters}
    size = np.sqrt(sum(((array - before[name].numpy()) ** 2).sum() for name, array in expected.items()))
    wrong, seen = 0.0, dict.fromkeys(expected, 0)
    for outcome in outcomes:
        for box, local in outcome.parameters:
            whole = expected[box.name][tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
            wrong += ((local - whole) ** 2).sum()
            seen[box.name] += local.size
    assert all(count >= expected[name].size for name, count in seen.items())
    assert np.sqrt(wrong) < 1e-7 * size


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Outcome]]:
    return run_distributed(run_all, WORLD_SIZE, DEFAULT)


@pytest.mark.parametrize("name", DEFAULT)
def test_steps_of_uneven_ranks_are_those_of_one_process(name: str, ranks: list[dict[str, Outcome]]) -> None:
    check(DEFAULT[name], [ranks[rank][name] for rank in DEFAULT[name].layout.mesh.devices])


def drawn(seed: int) -> Uneven:
    draw = random.Random(seed)
    config: DecoderConfig = draw.choice(
        [TWO, EXPERTS, replace(TWO, tied_embeddings=True), replace(TWO, head="scalar"), replace(TWO, mlp_bias=True)]
    )
    layout = draw.choice([{"dp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}])
    recomputation = draw.choice(["off", "selective", "full"])
    data_parallel = draw.choice(["fsdp", SHARDED, mixed(config, seed)])
    in_loss = [int(draw.random() < draw.choice([0.1, 0.5])) for _ in range(8)]
    in_loss[draw.randrange(8)] = 1
    return Uneven(
        **layout,
        config=config,
        compute=way(
            data_parallel,
            recomputation=recomputation,
            prefetch=draw.random() < 0.7,
            sequence_parallel="tp" in layout and draw.random() < 0.5,
        ),
        micro_batches=draw.choice([1, 2]) if layout == {"dp": 4} else draw.choice([1, 2, 4]),
        in_loss=tuple(in_loss),
        empty=draw.choice(LOSSES),
        alike=draw.random() < 0.5,
        # Two tokens at least: the loss predicts the second.
        lengths=draw.choice([(2, 3), (2, 11)]),
    )


@pytest.mark.slow
@settings(max_examples=2, deadline=None)
@given(seeds=st.lists(st.integers(0, 10**6), min_size=12, max_size=12, unique=True))
def test_steps_of_uneven_ranks_drawn_at_random(seeds: list[int]) -> None:
    cases = {f"{seed}": drawn(seed) for seed in seeds}
    outcomes = run_distributed(run_all, WORLD_SIZE, cases)
    for name, case in cases.items():
        check(case, [outcomes[rank][name] for rank in case.layout.mesh.devices])


def run_lending(rank: int) -> tuple[bool, list[float]]:
    """The second rank frees a unit and asks for it again while the first one computes with it."""
    layout = FlatLayout({"weight": (4, 3)}, shards=2)
    units = {name: GatheredUnit(layout, torch.full((layout.size // 2,), rank + 1.0)) for name in "ab"}
    modules = {name: nn.Identity() for name in units}
    gathering = Gathering(units, dist.group.WORLD, prefetch=False)
    for name, module in modules.items():
        gathering.connect(module, [units[name]], backward=False)
    vector = units["a"].arena.flat
    modules["a"](torch.zeros(1))
    address = vector.data_ptr()
    if rank == 1:
        modules["b"](torch.zeros(1))
        modules["a"](torch.zeros(1))
    gathering.end_pass()
    return vector.data_ptr() == address or rank == 1, vector[:: layout.size // 2].tolist()


AGAIN = Uneven(dp=2, config=TWO, compute=way("fsdp"), micro_batches=2, in_loss=(1,) * 8)


def run_again(rank: int) -> tuple[float, float]:
    """The gradient's norm of a step, and of the same step after one that has failed on all ranks behind the head."""
    groups = GroupTable([AGAIN.layout], rank).groups(AGAIN.layout)
    batch = AGAIN.uneven_batch.split(2)[groups.dp_index]
    norms, calls = [], []

    def fail(_: Tensor) -> None:
        raise RuntimeError("half-way")

    def failing(output: Any, part: Batch) -> tuple[Tensor, Stats]:
        calls.append(1)
        if len(calls) == 2:
            output.hidden.register_hook(fail)
        return next_token_loss(output, part)

    for fails in (False, True):
        model = built(AGAIN.config, groups, AGAIN.compute)
        if fails:
            with pytest.raises(RuntimeError, match="half-way"):
                model.train_step(batch, "tokens", failing, trained_tokens, AGAIN.micro_batches)
        stats = model.train_step(batch, "tokens", next_token_loss, trained_tokens, AGAIN.micro_batches)
        norms.append(stats["grad_norm"][0])
    return norms[0], norms[1]


def test_a_step_that_has_failed_leaves_no_gradient_to_the_next() -> None:
    for plain, again in run_distributed(run_again, 2):
        assert again == pytest.approx(plain, rel=1e-12)


def run_sink(rank: int) -> str:
    layout = FlatLayout({"weight": (4, 3)}, shards=2)
    unit = GatheredUnit(layout, torch.zeros(layout.size // 2, dtype=torch.bfloat16))
    parameter = unit.parameters["weight"] = nn.Parameter(unit.views["weight"])
    gathering = Gathering({"unit": unit}, dist.group.WORLD, prefetch=True)
    gathering.connect_weight(parameter, unit)
    gathering.attach_gradients({unit: torch.zeros(layout.size // 2)})
    sink = gradient_sink(parameter)
    assert sink is not None
    assert sink is gradient_sink(parameter), "what was added stays"
    assert sink.shape == (4, 3)
    return str(sink.dtype)


def test_gradients_are_added_up_in_the_dtype_that_they_are_kept_in() -> None:
    assert run_distributed(run_sink, 2) == ["torch.float32"] * 2


def test_a_unit_in_use_stays_where_it_is_when_a_peer_asks_for_it() -> None:
    assert run_distributed(run_lending, 2) == [(True, [1.0, 2.0])] * 2


# Modules of others: what a forward pass uses depends on what it is given.

FEATURES, OPERATORS, MAX_NORM = 8, 5, 0.05


class Chosen(nn.Module):
    """Applies the linears that it is told to, in that order; one may come twice, or none."""

    def __init__(self, *, frozen: bool, recomputes: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, FEATURES)
        self.parts = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(OPERATORS))
        self.head = nn.Linear(FEATURES, 3)
        self.recomputes = recomputes
        if frozen:
            self.parts[1].requires_grad_(False)

    def forward(self, x: Tensor, chosen: list[int], *, embeds: bool, has_head: bool) -> Tensor:
        if embeds:
            x = x + self.embed(torch.arange(len(x)) % 6)
        for part in chosen:
            layer = self.parts[part]
            if self.recomputes == "off":
                x = torch.tanh(layer(x)) + x
            else:
                x = torch.tanh(checkpoint(layer, x, use_reentrant=self.recomputes == "reentrant")) + x
        return self.head(x) if has_head else x


@dataclass(frozen=True)
class Pass:
    """What a rank does in a forward pass, and whether its loss depends on that."""

    chosen: list[int]
    embeds: bool = True
    has_head: bool = True
    is_in_loss: bool = True


@dataclass(frozen=True)
class ModuleCase:
    modes: Any
    passes: list[list[list[Pass]]]  # by step, pass and rank
    prefetch: bool = True
    frozen: bool = False
    recomputes: str = "off"


def loss_of(model: Any, part: Pass, seed: int) -> Tensor:
    inputs = torch.randn(3, FEATURES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if not part.embeds:
        inputs.requires_grad_()
    output = model(inputs, part.chosen, embeds=part.embeds, has_head=part.has_head)
    if not part.is_in_loss:
        return torch.zeros((), dtype=torch.float64, requires_grad=True)
    return (output - 1.0).square().mean()


def module_of(case: ModuleCase) -> Chosen:
    torch.manual_seed(4)
    return Chosen(frozen=case.frozen, recomputes=case.recomputes).double()


def adamw(vectors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(vectors, lr=1e-2, weight_decay=0.1)


def train_module(case: ModuleCase, rank: int, ranks: int) -> tuple[list[float], dict[str, np.ndarray]]:
    network = module_of(case)
    everything = Pass(list(range(OPERATORS)))
    with not_measured():
        model = realhf.osdp(
            network,
            adamw,
            init_device_mesh("cpu", (ranks,)),
            memory_gb=1,
            example=lambda samples: loss_of(network, everything, samples),
            batch_size=1,
            modes=case.modes,
            prefetch=case.prefetch,
        )
    norms = []
    for step, passes in enumerate(case.passes):
        for number, of_ranks in enumerate(passes):
            loss = loss_of(model, of_ranks[rank], 100 * step + 10 * number + rank)
            dist.all_reduce(loss.detach().clone())  # a script's own collectives, as for a log
            loss.backward()
            if all(part.is_in_loss for part in of_ranks):
                dist.all_reduce(loss.detach().clone())
        norms.append(model.step(MAX_NORM))
    return norms, {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def run_modules(rank: int, ranks: int, cases: dict[str, ModuleCase]) -> dict[str, Any]:
    with nan_in_new_memory():
        return {name: train_module(case, rank, ranks) for name, case in cases.items()}


def train_alone(case: ModuleCase, ranks: int) -> tuple[list[float], dict[str, np.ndarray]]:
    model = module_of(case)
    trained_here = [p for p in model.parameters() if p.requires_grad]
    optimizer, norms = adamw(trained_here), []
    for step, passes in enumerate(case.passes):
        for parameter in trained_here:  # not None: unused parameters decay too
            parameter.grad = torch.zeros_like(parameter)
        for number, of_ranks in enumerate(passes):
            for rank, part in enumerate(of_ranks):
                (loss_of(model, part, 100 * step + 10 * number + rank) / ranks).backward()
        norms.append(float(nn.utils.clip_grad_norm_(trained_here, MAX_NORM)))
        optimizer.step()
    return norms, {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


def check_module(case: ModuleCase, outcomes: list[tuple[list[float], dict[str, np.ndarray]]]) -> None:
    norms, state = train_alone(case, len(outcomes))
    for found, of_rank in outcomes:
        np.testing.assert_allclose(found, norms, rtol=1e-9)
        for name, expected in state.items():
            np.testing.assert_allclose(of_rank[name], expected, rtol=1e-8, atol=1e-10, err_msg=name)


USUAL, NOTHING = Pass([0, 1, 2, 3, 4]), Pass([], is_in_loss=False)
MODULES = {
    "experts of one rank": ModuleCase("sharded", [[[Pass([0, 1, 2]), Pass([0, 3, 2])]]] * 3),
    "another order": ModuleCase("sharded", [[[Pass([0, 1, 2, 3]), Pass([3, 1, 2, 0])]]] * 2, prefetch=False),
    "a loss without the model": ModuleCase("2 sharded", [[[USUAL, Pass([0, 1], is_in_loss=False)]], [[USUAL, USUAL]]]),
    "no embedding, no head, one twice": ModuleCase(
        "sharded", [[[Pass([2, 2, 4]), Pass([4], embeds=False, has_head=False)]]] * 2
    ),
    "a pass of two that one rank skips": ModuleCase("sharded", [[[USUAL, NOTHING], [Pass([1]), Pass([2, 3])]]] * 2),
    "frozen, recomputed within": ModuleCase(
        "sharded", [[[Pass([0, 1, 4]), Pass([1])]]] * 2, frozen=True, recomputes="reentrant"
    ),
    "mixed, recomputed": ModuleCase(
        (("*", "zero1"), ("parts.*", "2 sharded + 1 replicated"), ("head", "sharded")),
        [[[Pass([3, 1]), Pass([0])], [NOTHING, Pass([4])]]] * 2,
        recomputes="on",
    ),
}


@pytest.fixture(scope="module")
def modules() -> list[dict[str, Any]]:
    return run_distributed(run_modules, 2, 2, MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_which_ranks_use_other_parts(name: str, modules: list[dict[str, Any]]) -> None:
    check_module(MODULES[name], [rank[name] for rank in modules])


def drawn_module(seed: int, ranks: int) -> ModuleCase:
    draw = random.Random(seed)

    def one() -> Pass:
        chosen = [draw.randrange(OPERATORS) for _ in range(draw.randrange(6))]
        return Pass(chosen, draw.random() < 0.7, draw.random() < 0.7, draw.random() < 0.8)

    passes = draw.choice([1, 1, 2])
    return ModuleCase(
        draw.choice(["sharded", "2 sharded", (("*", "zero1"), ("parts.*", "2 sharded + 1 zero1"))]),
        [[[one() for _ in range(ranks)] for _ in range(passes)] for _ in range(3)],
        prefetch=draw.random() < 0.6,
        frozen=draw.random() < 0.3,
        recomputes=draw.choice(["off", "on", "reentrant"]),
    )


@pytest.mark.slow
@settings(max_examples=2, deadline=None)
@given(ranks=st.sampled_from([2, 4]), seeds=st.lists(st.integers(0, 10**6), min_size=20, max_size=20, unique=True))
def test_a_module_of_which_ranks_use_parts_at_random(ranks: int, seeds: list[int]) -> None:
    cases = {f"{seed}": drawn_module(seed, ranks) for seed in seeds}
    outcomes = run_distributed(run_modules, ranks, ranks, cases)
    for name, case in cases.items():
        check_module(case, [rank[name] for rank in outcomes])
