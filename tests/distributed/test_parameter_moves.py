"""Moves of a worker: bits that change on the way to a follower, or in a copy during a call, are noticed; a copy that
others take theirs from is kept for them, and no longer."""

from types import SimpleNamespace

import pytest
import torch
from msgspec import structs

from realhf.api.experiment import ModelSetup, OptimizerConfig
from realhf.api.resolved import ResolvedExperiment
from realhf.dataflow.follow import Follow
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP
from realhf.dataflow.plan import CallCompute, CallPlan, ExecutionPlan
from realhf.dataflow.splits import Split
from realhf.engine.backend import ModelSpec
from realhf.engine.model import ShardedModel
from realhf.engine.residency.in_place import PageByPage, Sides
from realhf.engine.residency.residency import Where
from realhf.geometry.parameters import parameter_count
from realhf.parallel.groups import GroupTable
from realhf.realloc.execute.executor import Reallocation, execute
from realhf.realloc.execute.verification import VerificationError
from realhf.realloc.plan.planner import DEFAULT_BUCKET_BYTES
from realhf.rundir.run import Run, RunSpec
from realhf.transport.messages import BatchKey, FollowParameters, PrepareMove, Reallocate, Release
from realhf.worker import parameter_moves
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
    experiment = SimpleNamespace(rpcs=RPCS, dataset=SimpleNamespace(keys=("prompt",)), models=models)
    return Run(spec, ResolvedExperiment(experiment), PLAN)


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

    def generate(self, step: int, is_disturbed: bool, plan: ExecutionPlan = PLAN) -> str:
        """What is said where a bit of the copy, or none, flips while the actor generates."""
        batch, layout = BatchKey("train", step), plan.layout("actor_generate")
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


# The actor lives on device 0 and generates on both. A judge takes its copy from there to device 1, a critique takes
# over the copy as it is.
SHARING = [
    call("actor", GENERATE, ["prompt"], ["seq"]),
    call("actor", INFERENCE, ["seq"], ["judged"], name="judge"),
    call("actor", INFERENCE, ["seq"], ["critique"], name="critique"),
    call("actor", TRAIN_STEP, ["seq", "judged", "critique"]),
]
SHARED = ExecutionPlan(
    num_devices=2,
    calls={
        "actor_generate": CallPlan(devices=(0, 2), dp=2),
        "judge": CallPlan(devices=(1, 1), copy_from="actor_generate"),
        "critique": CallPlan(devices=(0, 2), dp=2, copy_from="actor_generate"),
        "actor_train_step": CallPlan(devices=(0, 1)),
    },
)


class SharingWorker(Worker):
    """Carries out the requests of calls of the actor, and tells of each of its layouts what is there."""

    def __init__(self, rank: int, table: GroupTable):
        run = run_with(1.0, every=1)
        experiment = SimpleNamespace(
            rpcs=SHARING, dataset=SimpleNamespace(keys=("prompt",)), models={"actor": run.experiment.setups["actor"]}
        )
        super().__init__(rank, Run(run.spec, ResolvedExperiment(experiment), SHARED), table)
        for model in self.models.values():  # the home
            model.residency.held()[0][1].fill_(0.5)

    def prepare(self, step: int, name: str, split: Split = "train") -> None:
        layout, batch = SHARED.layout(name), BatchKey(split, step)
        self.moves.prepare(PrepareMove(request_id=0, batch=batch, name=name, model="actor", layout=layout))

    def move(self, step: int, name: str, split: Split = "train") -> None:
        batch, layout = BatchKey(split, step), SHARED.layout(name)
        self.moves.carry_out(
            Reallocate(request_id=0, batch=batch, call=name, model="actor", layout=layout, version=step)
        )

    def release(self, name: str) -> None:
        if self.rank in SHARED.layout(name).mesh.devices:
            self.moves.release(Release(model="actor", layout=SHARED.layout(name)))

    def tell(self) -> dict[str, str]:
        """Of every layout here whether its parameters are, and their first value."""
        found = {}
        for name in ("actor_train_step", "actor_generate", "judge"):
            if model := self.models.get(("actor", SHARED.layout(name))):
                residency = model.residency
                here = residency.where is Where.HERE
                found[name] = f"{residency.held()[0][1].flatten()[0]:.4f}" if here else residency.where.name
        return found


def shared_copies(rank: int) -> list[dict[str, str]]:
    """What is told after the requests of three steps and an evaluation, whose copies are for one call. In the first
    step the copy is taken over at last, in the second it is moved from at last, when the next step has prepared for it.
    """
    table = GroupTable([SHARED.layout(call) for call in SHARED.calls], rank)
    worker = SharingWorker(rank, table)
    copy, told = ("actor", SHARED.layout("actor_generate")), []

    def fill(step: int) -> None:
        worker.move(step, "actor_generate")
        worker.models[copy].residency.held()[0][1].fill_(step + 1)  # not what is at home
        told.append(worker.tell())

    def judge(step: int) -> None:
        worker.prepare(step, "judge")
        worker.move(step, "judge")
        told.append(worker.tell())
        worker.release("judge")

    worker.prepare(0, "actor_generate")
    fill(0)
    worker.release("actor_generate")
    told.append(worker.tell())
    judge(0)
    worker.release("critique")
    told.append(worker.tell())
    if rank == 0:
        worker.models["actor", SHARED.layout("actor_train_step")].residency.begin_at_version(1)
    worker.prepare(1, "actor_generate")
    fill(1)
    worker.release("actor_generate")
    worker.release("critique")
    worker.prepare(2, "actor_generate")
    judge(1)
    if rank == 0:
        worker.models["actor", SHARED.layout("actor_train_step")].residency.begin_at_version(2)
    fill(2)
    worker.release("actor_generate")
    worker.release("critique")
    judge(2)
    worker.prepare(2, "actor_generate", "evaluation")
    worker.move(2, "actor_generate", "evaluation")
    told.append(worker.tell())
    worker.release("actor_generate")
    told.append(worker.tell())
    return told


def test_a_copy_is_kept_until_all_have_theirs_of_it() -> None:
    home, other = run_distributed(shared_copies, 2)
    states = [told.pop("actor_train_step") for told in home]
    assert states == [*["0.5000"] * 8, "LENT", "0.5000"], "the home lends nothing to a copy that is kept"
    kept, second, third = ({"actor_generate": f"{step}.0000"} for step in (1, 2, 3))
    evaluated, freed = {"actor_generate": "0.5000"}, {"actor_generate": "FREED"}
    assert home == [kept, kept, kept, freed, second, freed, third, freed, evaluated, freed]
    gone = {"judge": "FREED"}
    assert other == [
        kept,
        kept,
        kept | {"judge": "1.0000"},
        freed | gone,
        second | gone,
        freed | {"judge": "2.0000"},
        third | gone,
        freed | {"judge": "3.0000"},
        evaluated | gone,
        freed | gone,
    ]


IN_PLACE = ExecutionPlan(
    num_devices=2,
    calls={
        "actor_generate": CallPlan(devices=(0, 2), dp=2, compute=CallCompute(in_place=True)),
        "reference_inference": CallPlan(devices=(1, 1)),
        "actor_train_step": CallPlan(devices=(0, 2), tp=2),
    },
)


class FlipsOneBit(PageByPage):
    """A passage that hands on a bit more than there was."""

    def lend(self, sides: Sides) -> None:
        super().lend(sides)
        sides.there()[0].view(-1).view(torch.int32)[2] ^= 1


def filled_in_place(rank: int) -> list[object]:
    table = GroupTable([IN_PLACE.layout(call) for call in IN_PLACE.calls], rank)
    worker = Worker(rank, Run(run_with(1.0, 1).spec, run_with(1.0, 1).experiment, IN_PLACE), table)
    home = worker.models["actor", IN_PLACE.layout("actor_train_step")].residency
    layout = IN_PLACE.layout("actor_generate")
    copy = worker.models["actor", layout].residency  # it is there from the start
    batch, name = BatchKey("train", 0), "actor_generate"
    worker.moves.prepare(PrepareMove(request_id=0, batch=batch, name=name, model="actor", layout=layout))
    told: list[object] = [copy.where.name]
    expected = ShardedModel(ModelSpec(TINY, table.groups(layout), torch.float32))
    expected.initialise(seed=len("actor"))
    before = [tensor.clone() for _, tensor in home.held()]
    looked: list[tuple[str, str, int, bool]] = []

    def executed(part: Reallocation) -> None:
        execute(part)
        parts = zip(copy.held(), expected.residency.held(), strict=True)
        is_whole = all(torch.equal(a, b) for (_, a), (_, b) in parts)
        looked.append((home.where.name, copy.where.name, part.plan.bucket_bytes, is_whole))

    parameter_moves.execute = executed  # type: ignore[assignment]  # in a process of its own
    for is_disturbed in (False, True):
        told.append(worker.generate(0, is_disturbed, IN_PLACE))
        told.append((home.where.name, copy.where.name))
        told.append(all(map(torch.equal, before, [tensor for _, tensor in home.held()])))
    home._passage = FlipsOneBit()
    try:
        worker.generate(0, False, IN_PLACE)
    except VerificationError as error:
        told.append(str(error))
    return [*told, *looked]


def test_a_copy_is_filled_in_place_of_its_home() -> None:
    places = ("HERE", "FREED")
    for rank, told in enumerate(run_distributed(filled_in_place, 2)):
        start, said, *first, noticed, back, is_same, lending, one, other = told
        assert (start, said, *first) == ("FREED", "", places, True)
        # The bit that flips in the copy lies in rank 0's part of the home.
        assert str(noticed)[:49] == ("", "actor: rank 0 took other values back than it had ")[rank == 0]
        assert (back, is_same) == (places, rank != 0)
        assert str(lending).startswith(f"actor: rank {rank} lent other values to a copy than it had, of parameter ")
        assert one == other == ("LENT", "HERE", DEFAULT_BUCKET_BYTES // 2, True)


CHANGING = structs.replace(PLAN, changes=("actor_generate",))


def changing_copy(rank: int) -> list[object]:
    """Whether the copy is right in each call, where it is after it, and what came: first all, then what changed, for an
    evaluation too, then nothing, and all once more by another plan."""
    table = GroupTable([PLAN.layout(call) for call in PLAN.calls], rank)
    worker, told = Worker(rank, run_with(1.0, every=1).changed(CHANGING), table), list[object]()
    layout, name = PLAN.layout("actor_generate"), "actor_generate"
    home = worker.models.get(("actor", PLAN.layout("actor_train_step")))
    expected = ShardedModel(ModelSpec(TINY, table.groups(layout), torch.float32))
    expected.initialise(seed=len("actor"))
    bucket_bytes = parameter_moves.DEFAULT_BUCKET_BYTES
    for step, split in enumerate(("train", "evaluation", "train", "train", "train")):
        parameter_moves.DEFAULT_BUCKET_BYTES = bucket_bytes // 2 if step == 4 else bucket_bytes
        if step < 3:
            for model in (home, expected) if home else (expected,):
                model.residency.held()[0][1].view(-1)[step] = 7.0
        batch = BatchKey(split, step)
        request = PrepareMove(request_id=0, batch=batch, name=name, model="actor", layout=layout)
        worker.moves.prepare(request)
        worker.moves.carry_out(
            Reallocate(request_id=0, batch=batch, call=name, model="actor", layout=layout, version=0)
        )
        residency = worker.models["actor", layout].residency
        parts = zip(residency.held(), expected.residency.held(), strict=True)
        told.append(all(torch.equal(a, b) for (_, a), (_, b) in parts))
        worker.moves.release(Release(model="actor", layout=layout))
        told.append((residency.where.name, dict(worker.moves.moved.pop(("actor", layout)))))
    return told


def test_a_copy_that_keeps_its_memory_gets_what_changed() -> None:
    home, other = run_distributed(changing_copy, 2)
    count = parameter_count(TINY)
    every = {"bytes": 4 * count, "whole_bytes": 4 * count, "changed": count, "elements": count}
    parts = other[3][1]["parts"]
    one = every | {"bytes": 8 * parts + 12, "changed": 1, "parts": parts}  # a count, a place, a value; padded
    none = one | {"bytes": 8 * parts, "changed": 0}
    assert other[::2] == home[::2] == [True] * 5
    assert other[1::2] == [("HERE", moved) for moved in (every, one, one, none, every)]
