"""What Python code asks of a run and what a command line asks are the same."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from realhf.base.errors import UserError
from realhf.experiments import ready_file
from realhf.launch.slurm.launcher import SlurmLauncher
from realhf.launch.slurm.script import SlurmOptions
from realhf.lifecycle.new import new_run
from realhf.lifecycle.request import RecoveryRequest, ReplanRequest, RunRequest, experiment_of
from realhf.planning.request import DevicesRequest, PlanRequest, SearchBudget
from realhf.rundir.run import Deadlines, RunSpec
from tests.unit.lifecycle.requests import request_of

EXPERIMENT, PLAN = "experiments/ppo.py", Path("tests/plans/single.json")


def test_a_request_is_written_in_words_or_in_python() -> None:
    words = (
        "--steps 3 --nodes 2 --gpus-per-node 4 --seconds 2 --launcher slurm --cpu-only --checkpoint-every 4 --recover "
        "auto --fallback-plan a.json --fallback-plan b.json --replan suggest --drift-threshold 2 --wandb mine"
    )
    asked = request_of(EXPERIMENT, *words.split(), "--record", "rewards", "values")
    assert replace(asked, words=()) == RunRequest(
        experiment=EXPERIMENT,
        fields=("--steps", "3"),
        plan=PlanRequest(devices=DevicesRequest(nodes=2, gpus_per_node=4), budget=SearchBudget(seconds=2.0)),
        launcher=SlurmLauncher,
        launcher_options=SlurmOptions(cpu_only=True),
        spec={
            "record": ("rewards", "values"),
            "wandb_project": "mine",
            "checkpoint_every_steps": 4,
            "drift_threshold": 2.0,
        },
        recovery=RecoveryRequest(recover="auto", fallback_plans=(Path("a.json"), Path("b.json"))),
        replan=ReplanRequest(mode="suggest"),
    )


def test_python_code_gets_a_run_for_a_request() -> None:
    request = RunRequest(
        experiment=EXPERIMENT,
        fields=("--steps", "3"),
        plan=PlanRequest(devices=DevicesRequest(num_workers=1), plan=PLAN),
        spec={"checkpoint_every_steps": 2, "keep_checkpoints": 1, "drift_threshold": 2.0},
    )
    spec = new_run(request).spec
    assert (spec.num_workers, spec.values["steps"], spec.network_interface) == (1, 3, "lo")
    assert (spec.checkpoint_every_steps, spec.keep_checkpoints, spec.drift_threshold) == (2, 1, 2.0)
    assert (spec.keep_best, spec.call_timeout_s) == (None, Deadlines.floor_s), "nobody asked for others"


def test_a_kernel_to_leave_out_that_is_not_known_is_found_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    request = RunRequest(experiment=EXPERIMENT, plan=PlanRequest(devices=DevicesRequest(num_workers=1), plan=PLAN))
    monkeypatch.setenv("REALHF_WITHOUT", "triton,flash")
    with pytest.raises(UserError, match="REALHF_WITHOUT: flash is not known; choose from triton, flash-attn, varlen"):
        new_run(request)


def test_a_number_out_of_its_range_is_no_request() -> None:
    with pytest.raises(UserError, match=r"--max-restarts 0 is not from 1 to 1,000,000; give a number in that range"):
        RecoveryRequest(recover="auto", max_restarts=0)
    with pytest.raises(UserError, match="--keep-checkpoints 0 is not from 1 to "):
        RunRequest(experiment=EXPERIMENT, spec={"keep_checkpoints": 0})
    with pytest.raises(UserError, match=r"--switch-cost-s nan is not from 0 to .* seconds"):
        ReplanRequest(switch_cost_s=float("nan"))
    with pytest.raises(UserError, match="are for --recover auto; give it, or leave them out"):
        RecoveryRequest(min_workers=2)


def test_where_it_runs_may_stand_at_the_experiment(tmp_path: Path) -> None:
    text = (
        Path(EXPERIMENT)
        .read_text()
        .replace("@auto(", '@auto(launcher="slurm", nodes=2, gpus_per_node=4, nodelist="node[01-02]", ', 1)
    )
    (tmp_path / "mine.py").write_text(text)

    def where(*words: str) -> tuple[str, int, int | None]:
        asked = request_of(tmp_path / "mine.py", *words)
        return asked.launcher.__name__, asked.plan.devices.nodes, asked.plan.devices.gpus_per_node

    assert where() == ("SlurmLauncher", 2, 4)
    assert where("--nodes", "3") == ("SlurmLauncher", 3, 4)
    assert where("--gpus-per-node=8") == ("SlurmLauncher", 2, 8)
    assert where("--num-workers", "2") == ("SlurmLauncher", 1, None)
    assert where("--launcher", "local") == ("LocalLauncher", 1, None)
    assert where("--launcher", "slurm") == ("SlurmLauncher", 2, 4)
    (tmp_path / "mine.py").write_text(text.replace("nodes=2", "nodes=0"))
    with pytest.raises(UserError, match=r"@auto: nodes 0 is not from 1 to 4,096"):
        where()


def test_a_resumed_run_may_be_given_its_rewards_and_evaluation_sets_again(tmp_path: Path) -> None:
    """An option that may be repeated adds to its default, but not to what the run began with."""
    words = ("--model", "model", "--data", "data.jsonl", "--reward", "a.py:first", "--reward", "b.py:second=2")
    words += ("--eval-data", "easy=a.jsonl", "--eval-data", "hard=b.jsonl", "--eval-every-steps", "2")
    path = str(ready_file("grpo"))
    values = msgspec.to_builtins(experiment_of(path, words).source)
    saved = RunSpec(
        experiment_file=path,
        experiment_class="grpo",
        values=values,
        working_directory=str(tmp_path),
        num_workers=1,
        devices_per_node=1,
    )
    for given in ((), words):
        assert msgspec.to_builtins(experiment_of(path, given, saved).source) == values
    other = experiment_of(path, ("--reward", "c.py:third", "--eval-data", "c.jsonl"), saved).source
    assert (other.reward.functions, other.eval_data) == (("c.py:third",), ("c.jsonl",))
