"""Generation on the devices that train, in layouts that contain the home's: what moves, what has memory, and that
rollouts and training are those of one process."""

from dataclasses import dataclass

import pytest
import torch

from realhf.api.experiment import OptimizerConfig
from realhf.api.generation import GenerationOptions
from realhf.architecture.compute import Computation, DataParallel
from realhf.engine.backend import ModelSpec
from realhf.engine.interface import GenerationRequest
from realhf.engine.model import ShardedModel
from realhf.geometry.boxes import device_boxes
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.micro_dp import grouped_like
from realhf.geometry.shards import Placement, flat_layout
from realhf.parallel.groups import GroupTable, ParallelGroups
from realhf.realloc.execute.executor import Reallocation, execute
from realhf.realloc.plan.planner import plan_between
from tests.distributed.pool import run_distributed
from tests.unit.engine.losses import ONE_RANK, next_token_loss, random_batch, tiny, trained_tokens

pytestmark = pytest.mark.distributed

CONFIG = tiny(tied_embeddings=True)
GENERATION = GenerationOptions(max_new_tokens=6, eos_token=1)
BATCH = random_batch(CONFIG, 8)


@dataclass(frozen=True, kw_only=True)
class Case:
    """The home's dp, tp, pp, and tp, pp of generation on the same devices."""

    home: tuple[int, int, int]
    tp: int
    pp: int
    data_parallel: DataParallel = "zero1"

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        home = ParallelStrategy(*self.home)
        mesh = DeviceMesh(0, home.size)
        plain = Layout(mesh, ParallelStrategy(home.size // (self.tp * self.pp), self.tp, self.pp))
        grouped = grouped_like(Layout(mesh, home), plain, CONFIG.num_layers)
        assert grouped is not None
        return Layout(mesh, home), grouped


@dataclass
class Outcome:
    """Of one rank: `sequences` by sample; bytes that it received, and of all parameters while the copy computed."""

    sequences: dict[int, list[int]]
    received_bytes: int
    lacking_bytes: int  # of generation's part beyond that of training
    during_bytes: int
    expected_bytes: int
    is_same_after: tuple[bool, bool]  # as a twin that never lent: after the call, and after another step


FOUR = {
    "tp4 to tp2": Case(home=(1, 4, 1), tp=2, pp=1),
    "tp2 pp2 to tp2": Case(home=(1, 2, 2), tp=2, pp=1),
}
EIGHT = {
    "figure 8": Case(home=(2, 4, 1), tp=2, pp=1),
    "dp2 tp2 pp2 to pp2": Case(home=(2, 2, 2), tp=1, pp=2),
    "dp2 tp2 pp2 to everything": Case(home=(2, 2, 2), tp=1, pp=1),
    "pp4 to pp2": Case(home=(2, 1, 4), tp=1, pp=2),
    "fully sharded, dp2 tp4 to tp2": Case(home=(2, 4, 1), tp=2, pp=1, data_parallel="fsdp"),
}


def built(groups: ParallelGroups, data_parallel: DataParallel = "zero1") -> ShardedModel:
    compute = Computation(data_parallel=data_parallel)
    optimizer = OptimizerConfig(lr=1e-2)
    model = ShardedModel(
        ModelSpec(CONFIG, groups, torch.float64, optimizer=optimizer, total_optimizer_steps=9, compute=compute)
    )
    model.initialise(seed=3)
    step(model)
    return model


def step(model: ShardedModel) -> None:
    groups = model.groups
    batch = BATCH.split(groups.layout.strategy.dp)[groups.dp_index]
    model.train_step(batch, "tokens", next_token_loss, trained_tokens, micro_batches=1)


def rollouts(model: ShardedModel) -> dict[int, list[int]]:
    groups = model.groups
    prompts = BATCH.split(groups.layout.strategy.dp)[groups.dp_index]
    output = model.generate(prompts, GenerationRequest(GENERATION, prompt_key="tokens", sample_key=(1, 0)))
    return {sample: tokens.tolist() for sample, tokens in zip(prompts.ids, output.sequences, strict=False)}


def parameter_bytes(*models: ShardedModel) -> int:
    return sum(model.parameters.flat.untyped_storage().nbytes() for model in models)


def elements(layout: Layout, rank: int) -> int:
    return sum(box.size for box in device_boxes(CONFIG, layout, rank))


def run_all(rank: int, cases: dict[str, Case]) -> dict[str, Outcome]:
    table = GroupTable([layout for case in cases.values() for layout in case.layouts], rank)
    return {name: run_case(rank, table, case) for name, case in cases.items()}


def run_case(rank: int, table: GroupTable, case: Case) -> Outcome:
    home_layout, layout = case.layouts
    home, twin = (built(table.groups(home_layout), case.data_parallel) for _ in range(2))
    copy = ShardedModel(ModelSpec(CONFIG, table.groups(layout), torch.float64))
    plan = plan_between(CONFIG, Placement(home_layout, case.data_parallel), Placement(layout), element_bytes=8)
    execute(Reallocation(plan, rank, home.residency.held(), copy.residency.held()))
    home.residency.lend_to(copy.residency)
    during = parameter_bytes(home, copy)
    sequences = rollouts(copy)
    home.residency.take_back_from(copy.residency)
    copy.residency.free()
    after_call = torch.equal(home.parameters.flat, twin.parameters.flat)
    for model in (home, twin):
        step(model)
    return Outcome(
        sequences=sequences,
        received_bytes=plan.received_bytes.get(rank, 0),
        lacking_bytes=8 * (elements(layout, rank) - elements(home_layout, rank)),
        during_bytes=during,
        expected_bytes=8 * flat_layout(CONFIG, layout, rank).size,
        is_same_after=(after_call, torch.equal(home.parameters.flat, twin.parameters.flat)),
    )


@pytest.mark.parametrize("cases", [FOUR, pytest.param(EIGHT, marks=pytest.mark.slow)], ids=["four", "eight"])
def test_generation_in_layouts_that_contain_the_home(cases: dict[str, Case]) -> None:
    world_size = next(iter(cases.values())).layouts[0].mesh.size
    ranks = run_distributed(run_all, world_size, cases)
    expected = rollouts(built(ONE_RANK))
    for name, case in cases.items():
        outcomes = [outcomes[name] for outcomes in ranks]
        found: dict[int, list[int]] = {}
        for outcome in outcomes:
            found |= outcome.sequences
        assert found == expected, name
        assert all(outcome.is_same_after == (True, True) for outcome in outcomes), name
        # Of parameters there is the generation's part and nothing else; the padding is its arena's.
        assert [o.during_bytes for o in outcomes] == [o.expected_bytes for o in outcomes], name
        if case.data_parallel == "zero1":
            assert [o.received_bytes for o in outcomes] == [o.lacking_bytes for o in outcomes], name
            assert all(outcome.lacking_bytes > 0 for outcome in outcomes), name
