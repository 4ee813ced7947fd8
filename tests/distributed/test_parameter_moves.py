"""What is verified of the moves of a worker: bits that change on the way to a follower, or in a copy during a call."""

from types import SimpleNamespace

import pytest
import torch

from realhf.api.experiment import ModelSetup, OptimizerConfig
from realhf.dataflow.follow import Follow
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP
from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.engine.backend import ModelSpec
from realhf.engine.model import ShardedModel
from realhf.parallel.groups import GroupTable
from realhf.realloc.execute.verification import VerificationError
from realhf.rundir.run import Run, RunSpec
from realhf.transport.messages import BatchKey, FollowParameters, PrepareMove, Reallocate, Release
from realhf.worker.parameter_moves import ParameterMoves
from tests.distributed.pool import run_distributed
from tests.distributed.test_realloc import FlipsABit
from tests.unit.api.calls import TINY, call
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.distributed

RPCS = [
    call("actor", GENERATE, ["prompt"], ["seq"]),
    call("reference", INFERENCE, ["seq"], ["logprob"]),
    call("actor", TRAIN_STEP, ["seq", "logprob"]),
]
# The actor lives on device 0 and generates on both, where the reference lives on device 1.
PLAN = ExecutionPlan(
    num_devices=2,
    calls={
        "actor_generate": CallPlan(devices=(0, 2), dp=2),
        "reference_inference": CallPlan(devices=(1, 1)),
        "actor_train_step": CallPlan(devices=(0, 1)),
    },
)
ETAS = (1.0, 0.3)


def run_with(eta: float, every: int) -> Run:
    spec = RunSpec(
        experiment_file="",
        experiment_class="",
        values={},
        working_directory="",
        num_workers=2,
        devices_per_node=2,
        verify_reallocations_every=every,
        call_timeout_s=PATIENCE_S,
    )
    models = {
        "actor": ModelSetup(optimizer=OptimizerConfig(lr=1e-3)),
        "reference": ModelSetup(follows=Follow("actor", eta=eta)),
    }
    return Run(spec, SimpleNamespace(rpcs=RPCS, dataset=SimpleNamespace(keys=("prompt",)), models=models), PLAN)


class Worker:
    """Its models, without a master."""

    def __init__(self, rank: int, run: Run, table: GroupTable):
        self.rank, self.run = rank, run
        self.models = {
            (name, home): ShardedModel(ModelSpec(TINY, table.groups(home), torch.float32))
            for name, home in run.homes.items()
            if rank in home.mesh.devices
        }
        for (name, _), model in self.models.items():
            model.initialise(seed=len(name))
        self.moves = ParameterMoves(run, rank, torch.device("cpu"), table, self.models)

    def follow(self, step: int, is_disturbed: bool) -> str:
        """What is said where the reference follows the actor, and perhaps a bit of what it receives flips."""
        if self.rank == 0:
            self.models["actor", self.run.homes["actor"]].residency.begin_at_version(step + 1)
        carrier_between = self.moves._carrier
        if is_disturbed and self.rank == 1:
            self.moves._carrier = lambda *layouts: FlipsABit(carrier_between(*layouts))  # type: ignore[method-assign]
        try:
            batch = BatchKey("train", step)
            self.moves.carry_out(FollowParameters(request_id=0, batch=batch, name="reference_follows_actor"))
        except VerificationError as error:
            return str(error)
        finally:
            self.moves._carrier = carrier_between  # type: ignore[method-assign]
        return ""

    def generate(self, step: int, is_disturbed: bool) -> str:
        """What is said where a bit of the copy, or none, flips while the actor generates."""
        batch, layout = BatchKey("train", step), PLAN.layout("actor_generate")
        name, model = "actor_generate", "actor"
        self.moves.prepare(PrepareMove(request_id=0, batch=batch, name=name, model=model, layout=layout))
        self.moves.carry_out(Reallocate(request_id=0, batch=batch, call=name, model=model, layout=layout, version=step))
        if is_disturbed:
            (first, *_) = self.models[model, layout].residency.held()
            first[1].view(-1).view(torch.int32)[3] ^= 1 << 31
        try:
            self.moves.release(Release(model=model, layout=layout))
        except VerificationError as error:
            return str(error)
        return ""


def disturbed_moves(rank: int) -> dict[str, list[str]]:
    table = GroupTable([PLAN.layout(call) for call in PLAN.calls], rank)
    said = {}
    for eta in ETAS:
        of_all = Worker(rank, run_with(eta, every=1), table)
        said[f"eta={eta:g}"] = [of_all.follow(step, is_disturbed=step == 1) for step in range(2)]
        of_some = Worker(rank, run_with(eta, every=3), table)
        said[f"eta={eta:g}, some"] = [of_some.follow(step, is_disturbed=step == 1) for step in range(2)]
    of_all = Worker(rank, run_with(1.0, every=1), table)
    said["lent"] = [of_all.generate(0, is_disturbed) for is_disturbed in (False, True)]
    of_none = Worker(rank, run_with(1.0, every=0), table)
    said["lent, none"] = [of_none.generate(0, is_disturbed=True)]
    return said


@pytest.fixture(scope="module")
def said() -> list[dict[str, list[str]]]:
    return run_distributed(disturbed_moves, 2)


@pytest.mark.parametrize("eta", ETAS)
def test_a_follower_notices_what_was_not_sent(said: list[dict[str, list[str]]], eta: float) -> None:
    sender, receiver = (of_rank[f"eta={eta:g}"] for of_rank in said)
    assert sender == ["", ""]
    assert receiver[0] == ""
    assert receiver[1].startswith("reallocation of reference: rank 1 holds other values than rank 0 sent of parameter ")
    # Of every third step, it is the first that is verified.
    assert all(of_rank[f"eta={eta:g}, some"] == ["", ""] for of_rank in said)


def test_a_home_notices_that_its_copy_has_changed(said: list[dict[str, list[str]]]) -> None:
    home, other = (of_rank["lent"] for of_rank in said)
    assert other == ["", ""]
    assert home[0] == ""
    assert home[1].startswith("actor: rank 0 took other values back than it had lent to a copy, of parameter model.")
    assert "a memory changed them while the call in the copy's layout ran" in home[1]
    assert said[0]["lent, none"] == [""]
