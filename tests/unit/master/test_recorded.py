"""What the master writes down of steps and evaluations, what it hands on, and what it plans for the dispatcher."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from realhf.base.errors import RunError
from realhf.data import sort_task
from realhf.data.datasets import SFTDataset
from realhf.data.rows import DatasetRows
from realhf.dataflow.follow import Follow
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import CallPlan, ExecutionPlan, plan_digest
from realhf.dataflow.splits import Split
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.master import master as master_module
from realhf.master.loop import CallRecord, PlannedGraph
from realhf.master.master import Master
from realhf.master.replies import Request
from realhf.master.state import Node
from realhf.rundir.events import read_events
from realhf.rundir.flight_recorder import read_activity
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Deadlines, RunSpec
from realhf.rundir.samples import Sample
from realhf.rundir.starts import StaleStartError, begin_start, current_start
from realhf.rundir.status import read_status
from realhf.transport import clock as awake
from realhf.transport.messages import CheckpointWritten, Completion, Reply, Span
from tests.unit.api.calls import call
from tests.unit.master.test_master import Clock, ScriptedServer

ZERO = Layout(DeviceMesh(0, 1), ParallelStrategy())
GRAPH = DataflowGraph(
    [
        call("actor", GENERATE, ["prompt"], ["seq"]),
        call("reference", INFERENCE, ["seq"], ["logprob"]),
        call("actor", TRAIN_STEP, ["seq", "logprob"]),
    ],
    ["prompt"],
    {"reference": Follow("actor", eta=0.5, every_steps=3)},
)
FOLLOWS = "reference_follows_actor"


class Told:
    """Takes what trackers are told."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.texts: list[Sequence[Sample]] = []
        self.is_closed = False

    def step(self, metrics: dict[str, Any]) -> None:
        self.steps.append(metrics)

    def evaluation(self, line: dict[str, Any]) -> None:
        self.evaluations.append(line)

    def samples(self, samples: Sequence[Sample]) -> None:
        self.texts.append(samples)

    def close(self) -> None:
        self.is_closed = True


class Planned:
    """In the dispatcher's place: keeps what is to be run, and answers with `ends` of records."""

    def __init__(self, *ends: tuple[int, list[CallRecord]], is_whole: bool = True) -> None:
        self._ends, self._is_whole = ends, is_whole
        self.asked: list[tuple[PlannedGraph, list[tuple[str, int]], int]] = []

    async def run_steps(
        self, planned: PlannedGraph, order: list[tuple[str, int]], max_steps_in_flight: int, on_step: Any
    ) -> bool:
        self.asked.append((planned, order, max_steps_in_flight))
        for step, records in self._ends:
            on_step(step, records)
        return self._is_whole


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


@pytest.fixture
def dataset(tmp_path: Path) -> SFTDataset:
    """Nine rows."""
    sort_task.make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "rows.jsonl").write_text((json.dumps({"prompt": "ba", "answer": "ab"}) + "\n") * 9)
    return SFTDataset(
        path=str(tmp_path / "rows.jsonl"), tokenizer=str(tmp_path / "tokenizer.json"), max_prompt_tokens=9
    )


def run_of(dataset: SFTDataset | None = None, **changes: Any) -> Any:
    spec = RunSpec(
        experiment_file="", experiment_class="", values={}, working_directory="", num_workers=3, devices_per_node=2,
        resume_step=4,
    )  # fmt: skip
    graphs = {"train": GRAPH, **dict.fromkeys(changes.get("evaluations", ()), EVALUATION)}
    given = {
        "spec": msgspec.structs.replace(spec, **changes.pop("spec", {})),
        "plan": ExecutionPlan(
            num_devices=3,
            calls={
                "actor_generate": CallPlan(devices=(0, 1), predicted_s=2.0),
                "reference_inference": CallPlan(devices=(0, 1)),
                "actor_train_step": CallPlan(devices=(0, 1)),
            },
            max_steps_in_flight=2,
        ),
        "batch_size": lambda _: 4,
        "planned_steps": 9,
        "experiment": SimpleNamespace(
            graph=GRAPH, graphs=graphs, steps=9, seed=5, dataset=dataset, evaluations=changes.pop("evaluations", {})
        ),
        "homes": {"actor": ZERO, "reference": ZERO},
        "deadlines": Deadlines(),
        "initial_steps": {},
    }
    run = SimpleNamespace(**given | changes)
    elsewhere = CallPlan(devices=(1, 2), dp=2)
    run.call_plan = lambda split, call: run.plan.of_call(GRAPH, call.name, 4) if split == "train" else elsewhere
    return run


def master_of(run: Any, directory: RunDirectory, start_id: str = "") -> tuple[Master, Told]:
    master = Master(run, directory, ScriptedServer([], Clock()), start_id)  # type: ignore[arg-type]
    told: Any = Told()
    master._trackers = told
    return master, told


def record(step: int, name: str, seconds: tuple[float, float] = (10.0, 12.0), **more: Any) -> CallRecord:
    reply = Reply(request_id=0, span=Span("compute", "", *seconds), **more)
    return CallRecord(Node(step, name), name.partition("_")[0], {0: reply})


def completion(sample: int) -> Completion:
    return Completion(sample=sample, prompt="ba", response=f"ab{sample}", reward=0.5)


def sample(step: int, number: int, split: Split) -> Sample:
    return Sample(step=step, sample=number, split=split, prompt="ba", response=f"ab{number}", reward=0.5)


def test_a_step_leaves_a_line_its_samples_its_state_and_its_statistics(directory: RunDirectory) -> None:
    """Steps count from 1 in files. The step before ended at 9 s; a model that follows has no version of weights."""
    run = run_of()
    master, told = master_of(run, directory)
    master._previous_end = 9.0
    made = [
        record(4, "actor_generate", tokens=60, weights_version=4, completions=(completion(2), completion(0))),
        record(4, "actor_train_step", (12.0, 14.0), weights_version=5, stats={"loss": (3.0, 2.0)}),
        record(4, FOLLOWS, (14.0, 15.0)),
    ]
    master._trace.add(0, Span("compute", "the last", 1.0, 2.0))
    master._record_step(4, made)
    (line,) = map(json.loads, directory.metrics.read_text().splitlines())
    assert (line["step"], line["time_s"], line["tokens"], line["loss"]) == (5, 6.0, 60, 1.5)
    assert (line["of_steps"], line["num_workers"]) == (run.experiment.steps, 3)
    assert line["plan"] == plan_digest(run.plan)[:12]
    versions = {name: times.get("weights_version") for name, times in line["calls"].items()}
    assert versions == {"actor_generate": 4, "actor_train_step": 5, FOLLOWS: None}
    assert [json.loads(text)["response"] for text in directory.samples.read_text().splitlines()] == ["ab0", "ab2"]
    assert told.steps == [line]
    assert told.texts == [[sample(5, 0, "train"), sample(5, 2, "train")]]
    assert '"the last"' in directory.trace.read_text(), "all that has happened can be read"
    assert master._statistics == {"time_s": 6.0, "tokens_per_s": 10.0, "loss": 1.5}
    status = read_status(directory.status)
    assert status is not None
    assert (status.state, status.step, status.steps) == ("running", 5, 9)
    master._record_step(5, [record(5, "actor_generate", (15.0, 18.0))])
    assert json.loads(directory.metrics.read_text().splitlines()[1])["time_s"] == 3.0, "from the end of the one before"


def test_uniform_rewards_are_noted_once(directory: RunDirectory) -> None:
    """The run ends after step 9; an earlier start of it has made steps 1 to 4."""
    master, _ = master_of(run_of(), directory)
    stats = {"informative_groups": (0.0, 4.0), "reward_mean": (2.0, 4.0)}
    for step in range(4, 9):
        master._record_step(step, [record(step, "actor_generate", (10.0, 11.0), stats=stats)])
    again, _ = master_of(run_of(), directory)
    again._record_step(8, [record(8, "actor_generate", (10.0, 11.0), stats=stats)])
    (event,) = read_events(directory.events)
    assert (event.event, event.step) == ("uniform_rewards", 9)
    text = "in steps 5 to 9 all responses to a prompt had the same reward (reward_mean 0.5); "
    assert text in event.message
    assert f"realhf status {directory.path} --samples" in event.message
    assert "neither too hard nor too easy" in event.message


def test_a_drift_is_noted_with_its_step(directory: RunDirectory) -> None:
    """The first step of a start does not count, and ten are compared: it is told after the eleventh."""
    master, _ = master_of(run_of(spec={"drift_threshold": 1.5}), directory)
    for step in range(4, 16):
        master._record_step(step, [record(step, "actor_generate", (10.0, 16.0))])
    (event,) = read_events(directory.events)
    assert (event.event, event.step) == ("drift", 15)
    assert event.message.startswith("actor_generate takes 3 times as long as the plan predicts (6 s, not 2 s)")
    again, _ = master_of(run_of(spec={"drift_threshold": 1.5}), directory)  # another start, under the same plan
    for step in range(16, 28):
        again._record_step(step, [record(step, "actor_generate", (10.0, 16.0))])
    assert read_events(directory.events) == [event]


def test_a_statistic_that_nothing_makes_is_told_after_the_first_step_alone(directory: RunDirectory) -> None:
    master, _ = master_of(run_of(spec={"keep_best": "accuracy"}), directory)
    master._record_step(5, [record(5, "actor_generate")])  # of a run that began with step 4
    with pytest.raises(RunError, match="--keep-best accuracy: neither step 5 nor an evaluation before it"):
        master._record_step(4, [record(4, "actor_generate")])


def test_a_step_of_an_earlier_start_is_not_recorded(directory: RunDirectory) -> None:
    begin_start(directory)
    master, told = master_of(run_of(), directory, current_start(directory))
    begin_start(directory)
    with pytest.raises(StaleStartError):
        master._record_step(4, [record(4, "actor_generate")])
    assert told.steps == []
    assert not directory.metrics.exists()


def test_steps_are_planned_as_run_and_plan_say(directory: RunDirectory, dataset: SFTDataset) -> None:
    """A model that follows every third step does so in steps 2 and 5, counted from 0."""
    run = run_of(dataset)
    run.plan = msgspec.structs.replace(run.plan, offload=("reference",))
    master, _ = master_of(run, directory)
    dispatcher: Any = Planned()
    master._dispatcher = dispatcher
    asyncio.run(master._train(4, 6))
    ((planned, order, in_flight),) = dispatcher.asked
    assert in_flight == 2
    names = ["actor_generate", "reference_inference", "actor_train_step"]
    assert order == [*((name, 4) for name in names), *((name, 5) for name in [*names, FOLLOWS])]
    assert (planned.split, planned.graph, planned.calls) == ("train", GRAPH, run.plan.calls)
    assert (planned.homes, planned.batch_size, planned.offload) == (run.homes, 4, ("reference",))
    assert (planned.versions, planned.devices_per_node) == (None, 2)
    rows = planned.rows
    assert (rows.seed, rows.batch_size, rows.samples_per_prompt) == (5, 4, 1)
    assert rows.tokens(4, [0, 1]) == DatasetRows(dataset, 5, 4).tokens(4, [0, 1])
    asyncio.run(master._train(6, 7))
    assert dispatcher.asked[1][0].rows is rows, "the data set is opened once"


def test_a_copy_from_a_copy_waits_for_it(directory: RunDirectory, dataset: SFTDataset) -> None:
    run = run_of(dataset)
    again = msgspec.structs.replace(run.plan.calls["actor_generate"], copy_from="actor_train_step")
    run.plan = msgspec.structs.replace(run.plan, calls={**run.plan.calls, "actor_generate": again})
    master, _ = master_of(run, directory)
    dispatcher: Any = Planned()
    master._dispatcher = dispatcher
    asyncio.run(master._train(0, 1))
    copies = [edge for edge in dispatcher.asked[0][0].graph.edges if edge.kind == "copy"]
    assert [(edge.parent, edge.child, edge.steps_back) for edge in copies] == [
        ("actor_train_step", "actor_generate", 0),
        ("actor_generate", "actor_train_step", 1),
    ]


EVALUATION = DataflowGraph(
    [call("actor", GENERATE, ["tokens"], ["seq"]), call("judge", INFERENCE, ["seq"])], ["tokens"]
)


def evaluated(
    directory: RunDirectory, dataset: SFTDataset, dispatcher: Any, splits: Sequence[Split] = ("evaluation",)
) -> tuple[Master, Told]:
    """The evaluation after step 6, in batches of at most 4: three of 3 for nine rows."""
    evaluation = SimpleNamespace(dataset=dataset, batch_size=4, every_steps=None)
    run = run_of(dataset, evaluations=dict.fromkeys(splits, evaluation))
    master, told = master_of(run, directory)
    master._dispatcher, master._statistics = dispatcher, {"loss": 1.0, "reward": 9.0}
    asyncio.run(master._evaluate(6))
    return master, told


def test_an_evaluation_is_the_mean_over_all_its_batches(directory: RunDirectory, dataset: SFTDataset) -> None:
    dispatcher = Planned(
        (0, [
            record(0, "actor_generate", completions=(completion(1), completion(0))),
            record(0, "judge_inference", stats={"reward": (3.0, 4.0), "empty": (0.0, 0.0)}),
        ]),
        (1, [
            record(1, "actor_generate", completions=(completion(1),)),
            record(1, "judge_inference", stats={"reward": (1.0, 4.0), "length": (6.0, 2.0)}),
        ]),
    )  # fmt: skip
    master, told = evaluated(directory, dataset, dispatcher)
    line = {"step": 6, "reward": 0.5, "length": 3.0}
    assert json.loads(directory.evaluations.read_text()) == line
    assert told.evaluations == [line]
    assert master._statistics == {"loss": 1.0, "reward": 0.5, "length": 3.0}
    first, second = (sample(6, number, "evaluation") for number in (0, 1))
    assert told.texts == [[first, second, msgspec.structs.replace(second, sample=4)]]
    assert [json.loads(text)["sample"] for text in directory.samples.read_text().splitlines()] == [0, 1, 4]
    activity = read_activity(directory.activity("master"))
    assert activity is not None
    assert activity.text == "evaluation after step 6: 2 of 3 batches"
    ((planned, order, in_flight),) = dispatcher.asked
    assert order == [(name, batch) for batch in (0, 1, 2) for name in ("actor_generate", "judge_inference")]
    assert in_flight == 1
    assert (planned.split, planned.graph, planned.batch_size) == ("evaluation", EVALUATION, 4)
    assert planned.calls == dict.fromkeys(EVALUATION.calls, CallPlan(devices=(1, 2), dp=2))
    assert (planned.offload, planned.devices_per_node) == ((), 2)
    assert planned.homes == {"actor": ZERO, "reference": ZERO}
    assert planned.versions is not None
    assert (planned.versions("actor", 1), planned.versions("reference", 1)) == (6, 6), "after six steps, in every batch"
    assert planned.trained_steps == 6
    assert planned.rows is not None
    assert (planned.rows.seed, planned.rows.batch_size) == (None, 4)
    assert planned.rows.tokens(0, [0, 2]) == DatasetRows(dataset, None, 4).tokens(0, [0, 2])
    assert (planned.samples(0), planned.samples(2)) == (3, 3)


EASY: Split = "evaluation/easy"
HARD: Split = "evaluation/hard"


def test_several_evaluation_sets_are_one_line_and_samples_of_their_own(
    directory: RunDirectory, dataset: SFTDataset
) -> None:
    stats = {EASY: (3.0, 4.0), HARD: (1.0, 4.0)}

    class BySet(Planned):
        async def run_steps(self, planned: PlannedGraph, *others: Any) -> bool:
            made = record(0, "judge_inference", stats={"reward": stats[planned.split]}, completions=(completion(2),))
            self._ends = ((0, [made]),)
            return await super().run_steps(planned, *others)

    dispatcher: Any = BySet()
    master, told = evaluated(directory, dataset, dispatcher, (EASY, HARD))
    line = {"step": 6, "easy/reward": 0.75, "hard/reward": 0.25}
    assert json.loads(directory.evaluations.read_text()) == line
    assert told.evaluations == [line]
    assert master._statistics == {"loss": 1.0, "reward": 9.0, "easy/reward": 0.75, "hard/reward": 0.25}
    assert told.texts == [[sample(6, 2, EASY)], [sample(6, 2, HARD)]]
    assert [json.loads(text)["split"] for text in directory.samples.read_text().splitlines()] == [EASY, HARD]
    assert [planned.split for planned, *_ in dispatcher.asked] == [EASY, HARD]
    activity = read_activity(directory.activity("master"))
    assert activity is not None
    assert activity.text == "evaluation/hard after step 6: 1 of 3 batches"


def test_a_second_set_that_is_cut_off_leaves_nothing_of_the_first(directory: RunDirectory, dataset: SFTDataset) -> None:
    class CutOff(Planned):
        async def run_steps(self, planned: PlannedGraph, *others: Any) -> bool:
            await super().run_steps(planned, *others)
            return planned.split == EASY

    made = record(0, "judge_inference", stats={"reward": (3.0, 4.0)}, completions=(completion(2),))
    master, told = evaluated(directory, dataset, CutOff((0, [made])), (EASY, HARD))
    assert (told.evaluations, told.texts) == ([], [])
    assert not directory.evaluations.exists()
    assert not directory.samples.exists()
    assert master._statistics == {"loss": 1.0, "reward": 9.0}


def test_an_evaluation_that_the_end_of_the_run_cuts_off_is_not_recorded(
    directory: RunDirectory, dataset: SFTDataset
) -> None:
    dispatcher = Planned((0, [record(0, "judge_inference", stats={"reward": (3.0, 4.0)})]), is_whole=False)
    master, told = evaluated(directory, dataset, dispatcher)
    assert (told.evaluations, told.texts) == ([], [])
    assert not directory.evaluations.exists()
    assert master._statistics == {"loss": 1.0, "reward": 9.0}


def test_a_run_without_an_evaluation_makes_none(directory: RunDirectory) -> None:
    master, told = master_of(run_of(), directory)
    dispatcher: Any = Planned()
    master._dispatcher = dispatcher
    asyncio.run(master._evaluate(4))
    assert (dispatcher.asked, told.evaluations) == ([], [])


def test_what_a_worker_did_is_told_by_the_master_s_clock(directory: RunDirectory) -> None:
    """The worker's clock is 100 s ahead."""
    master, _ = master_of(run_of(), directory)
    master._clocks.heard(1, master_module.now_s() + 100.0)
    master._clocks._differences[1][0] = -100.0
    replies: list[tuple[int, Reply]] = []
    spans: list[tuple[int, Span]] = []
    written: list[tuple[int, CheckpointWritten]] = []
    taking: Any = SimpleNamespace(
        reply=lambda *reply: replies.append(reply),
        written=lambda *report: written.append(report),
        add=lambda *span: spans.append(span),
    )
    master._dispatcher = master._saver = master._trace = taking
    span, early = Span("compute", "a", 500.0, 501.0), Span("compute", "a", 400.0, 401.0)
    waited, early_waited = Span("transfer", "a", 300.0, 500.0), Span("transfer", "a", 200.0, 400.0)
    master._take(1, Reply(request_id=3, span=span, tokens=7, wait=waited))
    master._take(1, Reply(request_id=4, span=span))
    master._take(0, Reply(request_id=5, span=span))
    assert replies == [
        (1, Reply(request_id=3, span=early, tokens=7, wait=early_waited)),
        (1, Reply(request_id=4, span=early)),
        (0, Reply(request_id=5, span=span)),
    ]
    assert (spans, written) == ([], [])
    report = CheckpointWritten(directory="part", span=span)
    master._take(1, report)
    assert (spans, written) == ([(1, early)], [(1, report)])
    assert len(replies) == 3


def test_checkpoints_are_of_this_run_by_this_dispatcher_and_this_start(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(master_module, "Saver", lambda *arguments: given.append(arguments))
    run = run_of()
    master, _ = master_of(run, directory, "12345678")
    assert given == [(run, directory, master._dispatcher, master._weights, "12345678")]


def test_requests_are_late_by_the_seconds_in_which_the_master_ran(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(awake, "time", SimpleNamespace(monotonic=lambda: now[0]))
    master, _ = master_of(run_of(deadlines=Deadlines(floor_s=7.0)), directory)
    assert master._dispatcher._deadlines == Deadlines(floor_s=7.0)
    request = Request("a checkpoint", 2.0)
    master._dispatcher._open.expect(2, request)
    for late in ({}, {}, {2: request}):
        now[0] += 1.0
        master._clock.tick()
        assert master._dispatcher.late() == late
    now[0] += 1000.0  # in which it did not run: at most two seconds count
    assert master._clock.now() == 5.0


def test_the_start_is_recorded_with_the_first_worker_that_is_not_ready(directory: RunDirectory) -> None:
    """Of the workers that say what they do; whoever is ready is not waited for."""

    def recorded() -> str:
        master._record_setup()
        activity = read_activity(directory.activity("master"))
        assert activity is not None
        return activity.text

    master, _ = master_of(run_of(), directory)
    assert recorded() == "setup: 0 of 3 workers connected, 0 ready"
    master._signs.heard(0, activity="setup: joining")
    master._signs.heard(1)
    master._signs.heard(2, activity="setup: model actor")
    assert recorded() == "setup: 3 of 3 workers connected, 0 ready; worker 0: joining"
    master._ready[0] = "CPU"
    assert recorded() == "setup: 3 of 3 workers connected, 1 ready; worker 2: model actor"
