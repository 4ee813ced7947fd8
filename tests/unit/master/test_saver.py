"""Checkpoints beside training: what waits for what, and what is said when one cannot be written."""

import asyncio
import math
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from realhf.api.experiment import ModelSetup, OptimizerConfig
from realhf.architecture.compute import Computation
from realhf.base.errors import RunError
from realhf.base.files import write_atomically
from realhf.dataflow.plan import ExecutionPlan, plan_digest
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.master.saver import Saver
from realhf.models.checkpoint_index import STEPS_KEY, initial_optimizer_steps, read_index, state_owners
from realhf.rundir.checkpoints import check, saved_steps
from realhf.rundir.events import read_events
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Deadlines
from realhf.rundir.starts import StaleStartError
from realhf.rundir.weights import SavedWeights
from realhf.transport.messages import CheckpointWritten, Span
from tests.unit.checkpoints import save_model, write_pieces
from tests.unit.launch.saved_runs import MODEL
from tests.unit.models.test_checkpoint import random_state
from tests.waiting import PATIENCE_S

HOME = Layout(DeviceMesh(0, 2), ParallelStrategy(dp=2))
SPAN = Span("writing", "", 0.0, 0.0)
TRAINED = ModelSetup(optimizer=OptimizerConfig())
WEIGHTS = {"actor": SavedWeights(version=2, dtype="float32", sums={"lm_head.weight": "00000000000000ff"})}
STATES = {"actor": SavedWeights(version=2, dtype="float32", sums={"lm_head.weight@exp_avg": "00000000000000fe"})}
SPEC = {"keep_checkpoints": None, "keep_best": None, "checkpoint_failures": 0}


class Workers:
    """Two workers that copy at once, and write when the test says so."""

    def __init__(self) -> None:
        self.asked: list[Path] = []
        self.writers: list[dict[int, tuple[str, ...]]] = []
        self.last: list[bool] = []
        self.states: dict[str, dict[str, float]] = {}

    async def save(self, directory: str, writers: dict[int, tuple[str, ...]], *, is_last: bool) -> None:
        self.writers.append(writers)
        self.asked.append(Path(directory))
        self.last.append(is_last)

    def write(self, saver: Saver, worker: int) -> None:
        part = self.asked[-1]
        boxes = state_owners(MODEL, HOME, "float32")[worker]
        pieces = [(box, torch.full(box.shape, float(worker))) for box in boxes]
        write_pieces(part / "actor", worker, pieces)
        saver.written(worker, CheckpointWritten(directory=str(part), span=SPAN))


Scenario = Callable[[Saver, Workers, asyncio.Task], Coroutine[Any, Any, None]]


def play(
    tmp_path: Path,
    scenario: Scenario,
    call_timeout_s: float = 600.0,
    setup: ModelSetup = TRAINED,
    changing: tuple[str, ...] = ("actor",),
    trained: tuple[str, ...] = ("actor",),
    start_id: str = "",
    versions: int = 1,
    **spec: Any,
) -> RunDirectory:
    """Runs `scenario` beside the saver's own task."""
    directory = RunDirectory.create(tmp_path / "run")
    graph = SimpleNamespace(models=dict.fromkeys(("actor", *changing), MODEL), versions_kept=lambda _: versions)
    run: Any = SimpleNamespace(
        spec=SimpleNamespace(num_workers=2, **(SPEC | spec)),
        experiment=SimpleNamespace(seed=5, steps=9, graph=graph, setups=dict.fromkeys(("actor", *changing), setup)),
        batch_size=lambda _: 8,
        plan=ExecutionPlan(num_devices=2, calls={}),
        homes=dict.fromkeys(("actor", *changing), HOME),
        deadlines=Deadlines(floor_s=call_timeout_s),
        computations=dict.fromkeys(("actor", *changing), Computation()),
        changing_models=list(changing),
        optimizer_steps=lambda model: 3 if model in trained else 0,
        initial_steps=dict.fromkeys(("actor", *changing), initial_optimizer_steps(setup)),
    )

    async def main() -> None:
        workers, weights = Workers(), SimpleNamespace(newest=lambda: WEIGHTS, newest_states=lambda: STATES)
        saver = Saver(run, directory, workers, weights, start_id)  # type: ignore[arg-type]
        task = asyncio.create_task(saver.run())
        try:
            await scenario(saver, workers, task)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    return directory


def test_training_goes_on_until_the_next_checkpoint_is_due(tmp_path: Path) -> None:
    async def scenario(saver: Saver, workers: Workers, _: asyncio.Task) -> None:
        await saver.begin(2, {"loss": 0.5})  # returns, though nobody has written
        second = asyncio.create_task(saver.begin(4, {"loss": 0.25}))
        workers.write(saver, 0)
        await asyncio.sleep(0.05)
        assert not second.done()
        assert len(workers.asked) == 1
        workers.write(saver, 1)
        await second
        assert len(workers.asked) == 2
        await asyncio.sleep(0.05)
        assert saver.saved_step == 2, "it waits for the workers once more"
        for worker in (1, 0):
            workers.write(saver, worker)
        await saver.settle()
        assert saver.saved_step == 4
        assert workers.writers == [{0: ("actor",), 1: ("actor",)}] * 2

    directory = play(tmp_path, scenario)
    assert saved_steps(directory.checkpoints) == [2, 4]
    state = check(directory.checkpoints / "step-4")
    assert (state.step, state.seed, state.samples, state.optimizer_steps) == (4, 5, 32, {"actor": 12})
    assert state.statistics == {"loss": 0.25}
    assert (directory.checkpoints / "latest").readlink() == Path("step-4")
    assert not list(directory.checkpoints.glob(".*"))


def test_the_steps_of_a_model_count_from_the_checkpoint_that_it_started_from(tmp_path: Path) -> None:
    """Which may have been tidied away since."""
    save_model(tmp_path / "first", MODEL, random_state(MODEL), {STEPS_KEY: 7})
    setup = ModelSetup(optimizer=OptimizerConfig(), checkpoint=str(tmp_path / "first"), with_optimizer=True)

    async def scenario(saver: Saver, workers: Workers, _: asyncio.Task) -> None:
        shutil.rmtree(tmp_path / "first")
        await saver.begin(2, {})
        for worker in (0, 1):
            workers.write(saver, worker)
        await saver.settle()

    directory = play(tmp_path, scenario, setup=setup)
    assert check(directory.checkpoints / "step-2").optimizer_steps == {"actor": 7 + 2 * 3}
    assert read_index(directory.checkpoints / "step-2/actor").metadata[STEPS_KEY] == 7 + 2 * 3


def test_a_run_without_a_model_that_changes_has_checkpoints_too(tmp_path: Path) -> None:
    async def scenario(saver: Saver, workers: Workers, _: asyncio.Task) -> None:
        await saver.begin(2, {})
        await asyncio.wait_for(saver.settle(), PATIENCE_S)

    assert saved_steps(play(tmp_path, scenario, changing=()).checkpoints) == [2]


def test_nothing_is_copied_for_the_checkpoint_that_ends_the_run(tmp_path: Path) -> None:
    """Of half a billion parameters over two workers a copy takes 3 GiB on each."""

    async def scenario(saver: Saver, workers: Workers, _: asyncio.Task) -> None:
        for step in (8, 9):
            await saver.begin(step, {})
            for worker in (0, 1):
                workers.write(saver, worker)
        await saver.settle()
        assert workers.last == [False, True]

    play(tmp_path, scenario)


def test_old_ones_go_when_a_new_one_is_complete(tmp_path: Path) -> None:
    async def scenario(saver: Saver, workers: Workers, _: asyncio.Task) -> None:
        for step in (1, 2, 3):
            await saver.begin(step, {})
            for worker in (0, 1):
                workers.write(saver, worker)
        await saver.settle()

    assert saved_steps(play(tmp_path, scenario, keep_checkpoints=2).checkpoints) == [2, 3]


def test_a_worker_whose_disk_is_full_is_named(tmp_path: Path) -> None:
    async def scenario(saver: Saver, workers: Workers, _: asyncio.Task) -> None:
        await saver.begin(2, {})
        message = CheckpointWritten(
            directory=str(workers.asked[0]), span=SPAN, error="OSError: No space left on device"
        )
        with pytest.raises(RunError, match=r"^worker 1 could not write its part of the checkpoint .*: No space left"):
            saver.written(1, message)

    assert saved_steps(play(tmp_path, scenario).checkpoints) == []


def test_a_report_that_nobody_asked_for_changes_nothing(tmp_path: Path) -> None:
    async def scenario(saver: Saver, workers: Workers, _: asyncio.Task) -> None:
        await saver.begin(2, {})
        workers.write(saver, 0)
        for worker, directory in ((0, str(workers.asked[0])), (1, "/elsewhere"), (2, str(workers.asked[0]))):
            with pytest.raises(ValueError, match="for which it was not asked"):
                saver.written(worker, CheckpointWritten(directory=directory, span=SPAN, error="disaster"))
        workers.write(saver, 1)
        await saver.settle()

    assert saved_steps(play(tmp_path, scenario).checkpoints) == [2]


def test_a_worker_that_never_finishes_is_named(tmp_path: Path) -> None:
    async def scenario(saver: Saver, workers: Workers, task: asyncio.Task) -> None:
        await saver.begin(2, {})
        workers.write(saver, 0)
        with pytest.raises(RunError, match=r"^worker 1: the checkpoint after step 2 was not written within 0\.2 s; "):
            await task

    play(tmp_path, scenario, call_timeout_s=0.2)


def test_a_file_that_is_gone_again_ends_the_run(tmp_path: Path) -> None:
    async def scenario(saver: Saver, workers: Workers, task: asyncio.Task) -> None:
        await saver.begin(2, {})
        workers.write(saver, 0)
        next(workers.asked[0].rglob("boxes-0.safetensors")).unlink()
        workers.write(saver, 1)
        with pytest.raises(RunError, match=r"could not complete the checkpoint after step 2: .*boxes-0\.safetensors"):
            await task

    play(tmp_path, scenario)


def test_a_disk_without_room_for_a_folder(tmp_path: Path) -> None:
    async def scenario(saver: Saver, workers: Workers, _: asyncio.Task) -> None:
        (tmp_path / "run/checkpoints/.step-2.part").write_text("in the way")
        with pytest.raises(RunError, match=r"could not complete the checkpoint after step 2: .*File exists"):
            await saver.begin(2, {})

    play(tmp_path, scenario)


def fail(saver: Saver, workers: Workers, worker: int) -> None:
    saver.written(worker, CheckpointWritten(directory=str(workers.asked[-1]), span=SPAN, error="OSError: no room"))


def test_as_many_failures_in_a_row_as_are_allowed(tmp_path: Path) -> None:
    async def scenario(saver: Saver, workers: Workers, task: asyncio.Task) -> None:
        for step in (1, 2, 4, 5):  # between them is one that works
            if step == 4:
                await saver.begin(3, {})
                for worker in (0, 1):
                    workers.write(saver, worker)
            await saver.begin(step, {})
            workers.write(saver, 0)
            fail(saver, workers, 1)
        await saver.begin(6, {})
        with pytest.raises(RunError, match=r"worker 1 could not write its part of the checkpoint .*step-6.*: no room"):
            fail(saver, workers, 1)

    directory = play(tmp_path, scenario, checkpoint_failures=2)
    assert saved_steps(directory.checkpoints) == [3]
    found = read_events(directory.events)
    assert [(event.event, event.step) for event in found] == [
        ("unsaved", 1), ("unsaved", 2), ("checkpoint", 3), ("unsaved", 4), ("unsaved", 5),
    ]  # fmt: skip
    assert found[0].message.endswith("the run goes on, and may fail to write 1 more in a row")
    assert [path.name for path in directory.checkpoints.glob(".step*")] == [".step-6.part"]


def test_what_the_master_cannot_complete_may_fail_too(tmp_path: Path) -> None:
    async def scenario(saver: Saver, workers: Workers, task: asyncio.Task) -> None:
        (tmp_path / "run/checkpoints/.step-1.part").write_text("in the way")
        await saver.begin(1, {})
        await saver.settle()
        await saver.begin(2, {})
        workers.write(saver, 0)
        next(workers.asked[0].rglob("boxes-0.safetensors")).unlink()
        workers.write(saver, 1)
        await saver.settle()
        assert not task.done()
        assert saver.saved_step == 0

    directory = play(tmp_path, scenario, checkpoint_failures=2)
    assert [(event.event, event.step) for event in read_events(directory.events)] == [("unsaved", 1), ("unsaved", 2)]


def test_the_last_one_has_to_be_written(tmp_path: Path) -> None:
    async def scenario(saver: Saver, workers: Workers, _: asyncio.Task) -> None:
        await saver.begin(9, {})
        with pytest.raises(RunError, match="no room"):
            fail(saver, workers, 0)

    play(tmp_path, scenario, checkpoint_failures=5)


def test_a_checkpoint_says_all_of_the_run_that_whoever_goes_on_needs(tmp_path: Path) -> None:
    """Numbers that are none cannot be written as JSON, and calls that keep no numbers are left out."""

    async def scenario(saver: Saver, workers: Workers, _: asyncio.Task) -> None:
        workers.states = {"train": {"kl_coef": 0.5}, "generate": {}}
        await saver.begin(2, {"loss": 0.5, "nothing": math.nan, "too_much": math.inf})
        for worker in (0, 1):
            workers.write(saver, worker)
        await saver.settle()

    directory = play(tmp_path, scenario)
    state = check(directory.checkpoints / "step-2")
    assert (state.step, state.seed, state.samples, state.num_workers) == (2, 5, 16, 2)
    assert state.plan_sha256 == plan_digest(ExecutionPlan(num_devices=2, calls={}))
    assert (state.calls, state.statistics) == ({"train": {"kl_coef": 0.5}}, {"loss": 0.5})
    assert (state.weights, state.states) == (WEIGHTS, STATES)
    assert (state.optimizer_steps, list(state.models)) == ({"actor": 6}, ["actor"])
    assert read_index(directory.checkpoints / "step-2/actor").metadata == {"step": 2, "seed": 5, STEPS_KEY: 6}


def test_workers_write_models_by_name_and_one_that_follows_has_no_optimizer_steps(tmp_path: Path) -> None:
    async def scenario(saver: Saver, workers: Workers, _: asyncio.Task) -> None:
        await saver.begin(2, {})
        assert workers.writers == [{0: ("actor", "mean"), 1: ("actor", "mean")}]
        for worker in (0, 1):
            for model, with_optimizer in (("actor", True), ("mean", False)):
                boxes = state_owners(MODEL, HOME, "float32", with_optimizer=with_optimizer)[worker]
                pieces = [(box, torch.full(box.shape, 1.0)) for box in boxes]
                write_pieces(workers.asked[0] / model, worker, pieces)
            saver.written(worker, CheckpointWritten(directory=str(workers.asked[0]), span=SPAN))
        await saver.settle()

    directory = play(tmp_path, scenario, changing=("mean", "actor"))
    assert check(directory.checkpoints / "step-2").optimizer_steps == {"actor": 6}
    assert STEPS_KEY not in read_index(directory.checkpoints / "step-2/mean").metadata


def test_each_start_writes_into_a_folder_of_its_own_and_a_stale_one_completes_nothing(tmp_path: Path) -> None:
    async def scenario(saver: Saver, workers: Workers, task: asyncio.Task) -> None:
        await saver.begin(2, {})
        assert workers.asked == [tmp_path / "run/checkpoints/.step-2.12345678.part"]
        write_atomically(tmp_path / "run/launcher/start", b"87654321\n")
        for worker in (0, 1):
            workers.write(saver, worker)
        with pytest.raises(StaleStartError):
            await task

    assert saved_steps(play(tmp_path, scenario, start_id="12345678").checkpoints) == []


def test_the_best_one_is_kept_beside_the_newest(tmp_path: Path) -> None:
    async def scenario(saver: Saver, workers: Workers, _: asyncio.Task) -> None:
        for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75), (4, 1.0)):
            await saver.begin(step, {"loss": loss})
            for worker in (0, 1):
                workers.write(saver, worker)
        await saver.settle()

    assert saved_steps(play(tmp_path, scenario, keep_checkpoints=1, keep_best="min:loss").checkpoints) == [2, 4]


def test_the_best_checkpoint_by_early_stopping_stays(tmp_path: Path) -> None:
    async def scenario(saver: Saver, workers: Workers, _: asyncio.Task) -> None:
        for step in (1, 2, 3):
            saver.kept_step = 1
            await saver.begin(step, {})
            for worker in (0, 1):
                workers.write(saver, worker)
        await saver.settle()

    assert saved_steps(play(tmp_path, scenario, keep_checkpoints=1).checkpoints) == [1, 3]


def test_what_a_worker_writes_follows_from_where_and_how_its_models_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that follows with staleness, with all the versions that its home keeps."""
    asked: list[tuple[Any, ...]] = []

    def owners(*given: Any, with_optimizer: bool, versions: int) -> dict[int, list[Any]]:
        asked.append((*given, with_optimizer, versions))
        return {}

    async def scenario(saver: Saver, workers: Workers, _: asyncio.Task) -> None:
        assert saver._owners == {"actor": {}, "rollout": {}}

    monkeypatch.setattr("realhf.master.saver.state_owners", owners)
    play(tmp_path, scenario, changing=("actor", "rollout"), versions=3)
    where = (MODEL, HOME, "float32", Computation().data_parallel)
    assert asked == [(*where, True, 3), (*where, False, 3)]
