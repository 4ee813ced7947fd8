"""What the run's plan does not have is refused; what the run's master sends is not."""

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from realhf.api.experiment import SETTINGS_ATTRIBUTE, AutoSettings, Evaluation
from realhf.api.resolved import ResolvedExperiment
from realhf.dataflow.graph import GENERATE
from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.master.loop import PlannedGraph
from realhf.rundir.run import Run, RunSpec
from realhf.transport.codec import Codec, UndecodableError
from realhf.transport.messages import (
    BatchKey,
    CallFunction,
    FreeBatch,
    LoadModel,
    OffloadModel,
    PrepareMove,
    Reallocate,
    Release,
    SaveCheckpoint,
    Send,
    Shutdown,
    ToWorker,
    Transfer,
)
from realhf.worker.requests import refusal
from tests.unit.api.calls import PPO_CALLS, call
from tests.unit.master.workers import Workers

HOME, ELSEWHERE = CallPlan(devices=(0, 4), dp=4), CallPlan(devices=(0, 2), tp=2)
TRAIN = BatchKey("train", 1)


@pytest.fixture
def run() -> Run:
    """PPO of two steps of 8 samples on 4 workers, which generates in another layout than it trains in."""
    calls = dict.fromkeys((c.name for c in PPO_CALLS), HOME) | {"actor_generate": ELSEWHERE}
    evaluation = Evaluation(
        rpcs=[call("actor", GENERATE, ["prompt"], ["answer"], name="accuracy")],
        dataset=SimpleNamespace(keys=("prompt",)),  # type: ignore[arg-type]
        batch_size=4,
    )
    experiment = SimpleNamespace(
        rpcs=PPO_CALLS, dataset=SimpleNamespace(keys=("prompt",)), steps=2, evaluation=evaluation
    )
    setattr(experiment, SETTINGS_ATTRIBUTE, AutoSettings(batch_size=8))
    files = {"experiment_file": "", "experiment_class": "", "values": {}, "working_directory": ""}
    return Run(
        RunSpec(**files, num_workers=4, devices_per_node=4),  # type: ignore[arg-type]
        ResolvedExperiment(experiment),
        ExecutionPlan(num_devices=4, calls=calls, offload=("reward",)),
    )


def requests_of(run: Run, checkpoints: Path) -> list[ToWorker]:
    """All that the master sends in a run."""
    workers = Workers(4, run.experiment.graph)

    async def script() -> None:
        train = PlannedGraph("train", run.experiment.graph, run.plan.calls, run.homes, 8, offload=run.plan.offload)
        await workers.dispatcher.run_steps(train, run.plan.unrolled(run.experiment.graph, 2), 2, lambda *_: None)
        workers.graph = graph = run.experiment.graphs["evaluation"]
        calls = {name: run.call_plan("evaluation", call) for name, call in graph.calls.items()}
        evaluate = PlannedGraph("evaluation", graph, calls, run.homes, 4, offload=run.plan.offload)
        await workers.dispatcher.run_steps(evaluate, [("accuracy", 0), ("accuracy", 1)], 1, lambda *_: None)
        await workers.dispatcher.save(str(checkpoints / ".step-2.part"), {0: ("actor", "critic")}, is_last=True)

    asyncio.run(script())
    return [message for _, message in workers.got]


def test_what_the_master_sends_is_executed(run: Run, tmp_path: Path) -> None:
    requests = requests_of(run, tmp_path)
    moves = {PrepareMove, Reallocate, Release}
    kinds = {CallFunction, *moves, LoadModel, OffloadModel, Transfer, FreeBatch, SaveCheckpoint}
    assert {type(request) for request in requests} == kinds
    assert [refusal(request, run, tmp_path) for request in requests] == [None] * len(requests)
    assert refusal(Shutdown(), run, tmp_path) is None


HOME_LAYOUT, OTHER = HOME.layout, Layout(DeviceMesh(0, 4), ParallelStrategy(tp=4))
CALL = CallFunction(
    request_id=1,
    batch=TRAIN,
    call="actor_train_step",
    layout=HOME_LAYOUT,
    mini_batches=((0, 1),),
    micro_batches=1,
    version=0,
)
COPY = Reallocate(request_id=1, batch=TRAIN, call="actor_generate", model="actor", layout=ELSEWHERE.layout, version=0)
PREPARE = PrepareMove(request_id=1, batch=TRAIN, name="actor_generate", model="actor", layout=ELSEWHERE.layout)


def change(request: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(request, **fields)


@pytest.mark.parametrize(
    "request_",
    [
        change(CALL, call="os.system"),
        change(CALL, call="accuracy"),  # of the evaluation
        change(CALL, layout=OTHER),
        change(CALL, batch=BatchKey("train", 2)),
        change(CALL, mini_batches=((0, 8),)),
        change(CALL, micro_batches=0),
        change(COPY, model="critic"),
        change(COPY, layout=OTHER),
        change(PREPARE, name="actor_train_step"),
        change(PREPARE, layout=OTHER),
        Release(model="actor", layout=HOME_LAYOUT),  # the home itself
        Release(model="critic", layout=ELSEWHERE.layout),
        Transfer(batch=TRAIN, sends=(Send(peer=4, key="seq", ids=(0,)),)),
        Transfer(batch=TRAIN, sends=(Send(peer=1, key="prompt", ids=(0,)),)),
        LoadModel(request_id=1, batch=TRAIN, model="critic", states=True),
        OffloadModel(request_id=1, batch=BatchKey("train", 2), model="reward"),
        FreeBatch(batch=BatchKey("train", 99)),
        SaveCheckpoint(request_id=1, directory="/etc", models=("actor",)),
        SaveCheckpoint(request_id=1, directory="checkpoints/../../keys", models=("actor",)),
        SaveCheckpoint(request_id=1, directory="checkpoints/step-1", models=("../actor",)),
    ],
)
def test_what_the_plan_does_not_have_is_refused(
    request_: ToWorker, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(CALL, run, Path("checkpoints")) is None
    assert refusal(COPY, run, Path("checkpoints")) is None
    assert refusal(PREPARE, run, Path("checkpoints")) is None
    assert refusal(request_, run, Path("checkpoints")) is not None


@pytest.mark.parametrize(
    "request_",
    [CALL, COPY, PREPARE, Transfer(batch=TRAIN), LoadModel(request_id=1, batch=TRAIN, model="reward", states=True),
     FreeBatch(batch=TRAIN)],
)  # fmt: skip
def test_a_run_without_evaluation_refuses_all_that_is_of_one(request_: Any, run: Run, tmp_path: Path) -> None:
    run.experiment.source.evaluation = None
    assert refusal(request_, run, tmp_path) is None
    of_evaluation = change(request_, batch=BatchKey("evaluation", 0))
    assert refusal(of_evaluation, run, tmp_path) == "a request of evaluation batch 1, which the run does not have"


def test_a_move_for_a_call_that_takes_over_a_copy_is_refused(run: Run, tmp_path: Path) -> None:
    """It would write into a copy that others compute with."""
    calls = {**run.plan.calls, "actor_generate": change(ELSEWHERE, copy_from="earlier"), "earlier": ELSEWHERE}
    taking = run.changed(change(run.plan, calls=calls))
    for request in (COPY, PREPARE):
        assert refusal(request, taking, tmp_path) == (
            "a reallocation for actor_generate, which takes over the copy of another call"
        )
    moved = run.changed(change(run.plan, calls={**calls, "earlier": HOME}))
    assert refusal(COPY, moved, tmp_path) is None


def test_ten_thousand_distorted_requests(run: Run, tmp_path: Path) -> None:
    """Each is refused, by codec or plan, or is one of this run: its calls, in their layouts, with their samples."""
    codec, dice = Codec[ToWorker](ToWorker), random.Random(5)
    frames = [codec.encode(request) for request in requests_of(run, tmp_path)]
    undecodable = refused = 0
    for i in range(10_000):
        changed = bytearray(frames[i % len(frames)])
        for _ in range(dice.choice([1, 1, 2, 8])):
            changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
        try:
            request = codec.decode(bytes(changed))
        except UndecodableError:
            undecodable += 1
            continue
        if refusal(request, run, tmp_path) is not None:
            refused += 1
        elif isinstance(request, CallFunction):
            plan = run.plan.calls[request.call if request.call != "accuracy" else "actor_generate"]
            assert request.layout == plan.layout
            assert {i for ids in request.mini_batches for i in ids} <= set(range(8))
    assert min(undecodable, refused) > 500
