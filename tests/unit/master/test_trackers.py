"""Metrics for other viewers: what each is told, what TensorBoard's files hold, and a library that is not there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from realhf.base.errors import UserError
from realhf.master import trackers
from realhf.master.trackers import Trackers, check_trackers, step_values
from realhf.rewards.details import RewardDetails
from realhf.rundir.run import RunSpec
from realhf.rundir.samples import Sample

LINE = {
    "step": 3,
    "of_steps": 4,
    "time_s": 2.0,
    "loss": 0.5,
    "calls": {"actor_generate": {"seconds": 1.5, "predicted_s": None, "peak_bytes": 2**29}},
    "peak_bytes": [2**29, 2**30],
}
SAMPLES = [
    Sample(
        step=3,
        sample=7,
        split="train",
        prompt="sort: ba",
        response="**ab**\n<img>",
        reward=0.5,
        details=RewardDetails(rewards={"right": 0.5}, columns={"answer": "ab"}, notes={"letters": "a\nb"}),
    ),
    Sample(step=3, sample=9, split="train", prompt="p", response="", reward=None),
]
VALUES = {"train/time_s": 2.0, "train/loss": 0.5, "seconds/actor_generate": 1.5, "memory/fullest_worker_gib": 1.0}


def spec(**changes: Any) -> RunSpec:
    return RunSpec(
        experiment_file="ppo.py",
        experiment_class="PPO",
        values={"steps": 4},
        working_directory=".",
        num_workers=2,
        devices_per_node=2,
        **changes,
    )


def test_the_numbers_of_a_step_by_name() -> None:
    assert dict(step_values(LINE)) == VALUES
    assert dict(step_values({"step": 1, "calls": {}, "peak_bytes": []})) == {"memory/fullest_worker_gib": 0.0}


def test_no_tracker_needs_no_library(tmp_path: Path) -> None:
    check_trackers(spec())
    none = Trackers(spec(), tmp_path)
    none.step(LINE)
    none.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tensorboard": True}, r"--tensorboard needs the package tensorboardX.* `pip install tensorboardX`"),
        ({"wandb_project": "ppo"}, r"--wandb needs the package wandb"),
        ({"trackio_project": "ppo"}, r"--trackio needs the package trackio.* `pip install trackio`"),
    ],
)
def test_a_library_that_lacks_is_named(asked: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = SimpleNamespace(validate_project_name=lambda name: None)
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(SQLiteStorage=storage))
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    check_trackers(spec())
    with pytest.raises(UserError, match=message):
        check_trackers(spec(**asked))
    monkeypatch.setattr(trackers, "find_spec", lambda name: name)
    check_trackers(spec(**asked))


QUIET = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
CONFIG = {"name": "first", "config": {"steps": 4}}


@pytest.mark.parametrize(
    ("library", "asked", "begun"),
    [
        ("wandb", {"wandb_project": "ppo"}, CONFIG | {"project": "ppo", "dir": "runs/first"}),
        ("trackio", {"trackio_project": "ppo"}, CONFIG | {"project": "ppo", "resume": "never", **QUIET}),
        (
            "trackio",
            {"trackio_project": "ppo", "resume_step": 2},
            CONFIG | {"project": "ppo", "resume": "allow", **QUIET},
        ),
    ],
)
def test_libraries_of_one_interface_are_told_the_same(
    library: str, asked: dict[str, Any], begun: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in for the library, which follows its documentation."""
    told: list[Any] = []
    run = SimpleNamespace(log=lambda values, step: told.append((step, values)), finish=lambda: told.append("finish"))

    def init(**named: Any) -> SimpleNamespace:
        told.append(named)
        return run

    def table(*, columns: list[str], data: list[list[Any]]) -> dict[str, Any]:
        return {"columns": columns, "data": data}

    monkeypatch.setitem(sys.modules, library, SimpleNamespace(init=init, Table=table))
    tracked = Trackers(spec(**asked), Path("runs/first"))
    tracked.evaluation({"step": 0, "accuracy": 0.25})
    tracked.step(LINE)
    tracked.samples([])
    tracked.samples(SAMPLES)
    tracked.close()
    assert told == [
        begun,
        (0, {"evaluation/accuracy": 0.25}),
        (3, VALUES),
        (
            3,
            {
                "samples/train": {
                    "columns": ["sample", "prompt", "response", "reward", "reward_right", "answer", "letters"],
                    "data": [[7, "sort: ba", "**ab**\n<img>", 0.5, 0.5, "ab", "a\nb"], [9, "p", "", *[None] * 4]],
                }
            },
        ),
        "finish",
    ]


TRACKIO = """
import json, os, sys
reached = []
watched = ("socket.connect", "socket.bind", "socket.getaddrinfo", "subprocess.Popen")
sys.addaudithook(lambda event, _: reached.append(event) if event in watched else None)
from tests.unit.master.test_trackers import LINE, SAMPLES, Trackers, check_trackers, Path, spec
from realhf.base.errors import UserError
for resume_step, steps in ((0, (1, 2, 3)), (2, (3, 4))):
    check_trackers(asked := spec(trackio_project="ppo", resume_step=resume_step))
    tracked = Trackers(asked, Path("runs/first"))
    if not resume_step:
        tracked.evaluation({"step": 0, "easy/accuracy": 0.25})
        tracked.samples(SAMPLES)
    for step in steps:
        tracked.step(LINE | {"step": step, "loss": step / 4 + resume_step})
    tracked.close()
said = []
for name, variable in (("registry-a", ""), ("ppo", "TRACKIO_SPACE_ID")):
    os.environ[variable or "NOTHING"] = "me/space"
    try:
        check_trackers(spec(trackio_project=name))
    except UserError as error:
        said.append(str(error))
import trackio
[run] = trackio.Api().runs("ppo")
from trackio.sqlite_storage import SQLiteStorage
logs = SQLiteStorage.get_logs("ppo", run_id=run.id)
seen = [reached, "HF_HUB_OFFLINE" in os.environ, run.name, run.config, logs, said]
print(json.dumps(seen), file=sys.stderr)
"""


def test_trackio_reads_the_numbers_without_a_network(tmp_path: Path) -> None:
    """The real library, in a process of its own: it takes its folder from the environment when it is imported."""
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_TOKEN": "hf_token"}
    environment = {name: value for name, value in environment.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run([sys.executable, "-c", TRACKIO], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reached, is_offline, name, config, logs, said = json.loads(done.stderr.splitlines()[-1])
    assert (reached, is_offline, name, config["steps"]) == ([], False, "first", 4)
    numbers = [(line["step"], line.get("train/loss"), line.get("evaluation/easy/accuracy")) for line in logs]
    assert numbers == [
        *[(0, None, 0.25), (3, None, None), (1, 0.25, None), (2, 0.5, None), (3, 0.75, None)],
        *[(3, 2.75, None), (4, 3.0, None)],
    ]
    first, second = logs[1]["samples/train"]["_value"]
    assert (first["response"], first["reward_right"], second["reward"]) == ("**ab**\n<img>", 0.5, None)
    assert "names beginning with 'registry-' are reserved" in said[0]
    assert "TRACKIO_SPACE_ID=me/space has trackio send metrics there" in said[1]


def read_by_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by name, as the program `tensorboard` shows them."""
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {name: [(event.step, event.value) for event in reader.Scalars(name)] for name in reader.Tags()["scalars"]}


def test_tensorboard_reads_the_numbers(tmp_path: Path) -> None:
    tracked = Trackers(spec(tensorboard=True), tmp_path)
    tracked.evaluation({"step": 0, "accuracy": 0.25})
    tracked.step(LINE)
    tracked.step(LINE | {"step": 4, "loss": 0.25})
    tracked.close()
    assert read_by_tensorboard(tmp_path / "tensorboard") == {
        "evaluation/accuracy": [(0, 0.25)],
        "train/loss": [(3, 0.5), (4, 0.25)],
        **{name: [(3, value), (4, value)] for name, value in VALUES.items() if name != "train/loss"},
    }


def test_tensorboard_s_files_have_what_was_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    writer = SimpleNamespace(
        add_scalar=lambda *scalar: told.append(scalar),
        add_text=lambda name, text, step: told.append((name, text.count("**sample"), step)),
        flush=lambda: told.append("flush"),
        close=lambda: told.append("close"),
    )
    monkeypatch.setattr("tensorboardX.SummaryWriter", lambda folder, purge_step: (told.append(purge_step), writer)[1])
    tracked = Trackers(spec(tensorboard=True, resume_step=2), tmp_path)
    tracked.evaluation({"step": 2, "accuracy": 0.25})
    tracked.samples(SAMPLES)
    tracked.close()
    assert told == [3, ("evaluation/accuracy", 0.25, 2), "flush", ("samples/train", 2, 3), "flush", "close"]


def test_tensorboard_reads_the_samples(tmp_path: Path) -> None:
    tracked = Trackers(spec(tensorboard=True), tmp_path)
    tracked.samples(SAMPLES)
    tracked.samples([Sample(step=3, sample=0, split="evaluation", prompt="e", response="f", reward=1.0)])
    tracked.close()
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    texts = {name: reader.Tensors(name) for name in reader.Tags()["tensors"]}
    assert sorted(texts) == ["samples/evaluation/text_summary", "samples/train/text_summary"]
    [event] = texts["samples/train/text_summary"]
    assert event.step == 3
    text = event.tensor_proto.string_val[0].decode()
    assert "**sample 7, reward 0.5**\n\nprompt\n\n    sort: ba\n" in text
    assert (
        "response\n\n    **ab**\n    <img>\n\nreward_right\n\n    0.5\n\nanswer\n\n    ab\n\nletters\n\n    a\n    b\n"
        in text
    )
    assert "sample 9, reward none" in text


def test_steps_that_are_made_again_stand_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for start, resume_step, losses in ((0, 0, {1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0}), (100, 2, {3: 2.5, 4: 1.5})):
        # Files are named by the second.
        monkeypatch.setattr("tensorboardX.event_file_writer.time", SimpleNamespace(time=lambda now=1e9 + start: now))
        tracked = Trackers(spec(tensorboard=True, resume_step=resume_step), tmp_path)
        for step, loss in losses.items():
            tracked.step(LINE | {"step": step, "loss": loss})
        tracked.close()
    losses_shown = read_by_tensorboard(tmp_path / "tensorboard")["train/loss"]
    assert losses_shown == [(1, 4.0), (2, 3.0), (3, 2.5), (4, 1.5)]
