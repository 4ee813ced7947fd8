"""What the last lines of a run that ends early say."""

import argparse
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realhf import cli
from realhf.base.errors import RunError, UserError
from realhf.base.options import flags
from realhf.launch.local import LocalLauncher
from realhf.launch.slurm.launcher import SlurmLauncher
from realhf.lifecycle.advice import going_on, not_kept, resume_command
from realhf.lifecycle.request import RunRequest
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run, RunSpec
from tests.unit.lifecycle.requests import request_of

OF_THIS_START = {
    "experiment",
    "run_dir",
    "resume",
    "dry_run",
    "detach",
    "plan_in_job",
    "seeds",
    "sweep",
    "at_most",
    "accept_changed_inputs",
}
IN_THE_PLAN_OR_ITS_DEVICES = {
    "plan",
    "rule",
    "ignore_runs",
    "moved_by",
    "send_changes",
    "offload",
    "staleness_up_to",
    "num_workers",
    "nodes",
    "gpus_per_node",
    "hardware",
    "memory_gb",
}


def asked(*words: str) -> RunRequest:
    return request_of("experiments/ppo.py", *words)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    return RunDirectory.create(tmp_path / "runs/first")


def run_of(steps: int = 20, **spec: Any) -> Run:
    base = RunSpec(
        experiment_file="", experiment_class="", values={}, working_directory="", num_workers=2, devices_per_node=2,
        **spec,
    )  # fmt: skip
    plan: Any = None
    return Run(base, SimpleNamespace(steps=steps), plan)


def save(directory: RunDirectory, *steps: int) -> None:
    for step in steps:
        (directory.checkpoints / f"step-{step}").mkdir()


def test_a_checkpoint_and_the_command_that_goes_on_from_it(directory: RunDirectory) -> None:
    save(directory, 4, 8)
    given = asked("--run-dir", "runs/first", "--checkpoint-every", "4", "--steps", "20")
    go_on = "go on with: realhf run experiments/ppo.py --run-dir runs/first --resume"
    assert going_on(run_of(), directory, given, 11).splitlines() == [
        "saved: the checkpoint after step 8, runs/first/checkpoints/step-8; the steps after it, to step 11, have to be "
        "made again",
        go_on,
    ]
    assert going_on(run_of(), directory, given, 8).splitlines() == [
        "saved: the checkpoint after step 8, runs/first/checkpoints/step-8",
        go_on,
    ]


@pytest.mark.parametrize(
    ("spec", "step", "why"),
    [
        ({}, 3, "no checkpoint was due before step 20; --checkpoint-every N saves on the way"),
        ({"checkpoint_every_steps": 5}, 3, "no checkpoint was due before step 5"),
        ({"checkpoint_every_steps": 50}, 3, "no checkpoint was due before step 20"),
        ({"checkpoint_every_minutes": 30.0}, 3, "the first checkpoint was due after 30 minutes"),
        ({"checkpoint_every_steps": 5}, 7, "no checkpoint has been written"),
    ],
)
def test_nothing_was_saved(spec: dict[str, Any], step: int, why: str, directory: RunDirectory) -> None:
    text = going_on(run_of(**spec), directory, asked("--ppo.kl-coef", "0.1"), step)
    new = "realhf run experiments/ppo.py --ppo.kl-coef 0.1"
    assert text.splitlines() == [f"nothing was saved: {why}", f"start anew with: {new}"]


@pytest.mark.parametrize("name", ["grpo", "ppo-ptx", "reinforce++"])
def test_a_ready_experiment_is_named_as_its_user_knows_it(name: str, directory: RunDirectory) -> None:
    save(directory, 4)
    text = going_on(run_of(), directory, request_of(name, "--run-dir", "runs/first"), 4)
    assert text.endswith(f"\ngo on with: realhf run {name} --run-dir runs/first --resume")


@pytest.mark.parametrize("word", [["--run-dir", "runs/first"], ["--run-dir=runs/first"]])
def test_a_new_start_has_another_directory(word: list[str], directory: RunDirectory) -> None:
    (directory.path.parent / "first-2").mkdir()
    text = going_on(run_of(), directory, asked(*word, "--steps", "20"), 3)
    assert text.endswith("\nstart anew with: realhf run experiments/ppo.py --steps 20 --run-dir runs/first-3")


def test_the_command_has_the_options_that_the_directory_does_not_keep(directory: RunDirectory) -> None:
    words = (
        "--launcher slurm --partition gpu --account 'my lab' --time-limit 1-0 --nodelist node[1-2] --cpu-only "
        "--sbatch=--qos=high --sbatch=-x --queue-timeout-s 60 --network-interface eth0 --recover auto --max-restarts 5 "
        "--min-workers 1 --fallback-plan a.json --fallback-plan b.json --replan switch --switch-cost-s 3 --seconds 2 "
        "--hardware h100"
    )
    given = asked(*shlex.split(words), "--checkpoint-every", "4", "--nodes", "2", "--ppo.kl-coef", "0.1")
    head, *command = shlex.split(resume_command(given, directory))
    assert (head, command[:5]) == ("realhf", ["run", "experiments/ppo.py", "--run-dir", "runs/first", "--resume"])
    again = request_of(*command[1:])
    same = ("experiment", "launcher", "launcher_options", "recovery", "replan")
    assert {name: getattr(again, name) for name in same} == {name: getattr(given, name) for name in same}
    assert again.plan.budget == given.plan.budget
    assert again.fields == ()
    assert again.spec == {"network_interface": "eth0"}, "the run knows the others"


def test_every_option_is_kept_by_the_run_or_given_again() -> None:
    options = {action.dest for action in cli.parser("run")._actions} - {"list", "then", "help", "help_all"}
    kept = flags(RunSpec)
    again = {*not_kept(LocalLauncher), *not_kept(SlurmLauncher)}
    known = {flag.removeprefix("--").replace("-", "_") for flag in kept.keys() | again}
    assert options == {*known, *OF_THIS_START, *IN_THE_PLAN_OR_ITS_DEVICES}


@pytest.mark.parametrize(
    ("error", "text"),
    [(RunError("it broke"), "error: it broke"), (UserError("no"), "error: no"), (KeyboardInterrupt(), "interrupted")],
)
def test_they_stand_behind_the_error(
    error: BaseException, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def execute(_: argparse.Namespace) -> int:
        error.add_note("saved: this\ngo on with: that")
        raise error

    monkeypatch.setattr("realhf.cli.run.execute", execute)
    cli.main(["run", "experiment.py"])
    assert capsys.readouterr().err == f"{text}\nsaved: this\ngo on with: that\n"
