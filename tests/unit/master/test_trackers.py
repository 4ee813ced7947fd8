"""Metrics for other viewers: what each is told, what TensorBoard's files hold, and a library that is not there."""

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
    ],
)
def test_a_library_that_lacks_is_named(asked: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    check_trackers(spec())
    with pytest.raises(UserError, match=message):
        check_trackers(spec(**asked))
    monkeypatch.setattr(trackers, "find_spec", lambda name: name)
    check_trackers(spec(**asked))


def test_weights_and_biases_is_told_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for the library, which follows its documentation."""
    told: list[Any] = []
    run = SimpleNamespace(log=lambda values, step: told.append((step, values)), finish=lambda: told.append("finish"))

    def init(*, project: str, name: str, dir: str, config: dict[str, Any]) -> SimpleNamespace:
        told.append((project, name, dir, config))
        return run

    def table(*, columns: list[str], data: list[list[Any]]) -> dict[str, Any]:
        return {"columns": columns, "data": data}

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Table=table))
    tracked = Trackers(spec(wandb_project="ppo"), tmp_path / "first")
    tracked.evaluation({"step": 0, "accuracy": 0.25})
    tracked.step(LINE)
    tracked.samples([])
    tracked.samples(SAMPLES)
    tracked.close()
    assert told == [
        ("ppo", "first", str(tmp_path / "first"), {"steps": 4}),
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
