"""How long a request may take."""

from types import SimpleNamespace
from typing import Any

from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.launch import supervisor
from realhf.lifecycle import replan
from realhf.master import clocks, drift, master
from realhf.rundir.run import Deadlines, Run, RunSpec
from realhf.transport import server


def test_a_deadline_is_so_many_times_the_prediction_and_at_least_the_floor() -> None:
    deadlines = Deadlines(floor_s=600.0, factor=20.0, longest_predicted_s=90.0)
    assert deadlines.of(None) == deadlines.of(0.5) == deadlines.of(30.0) == 600.0
    assert deadlines.of(31.0) == 620.0
    assert deadlines.longest_s == 1800.0
    assert Deadlines().longest_s == 600.0


def test_the_limits_are_those_that_the_page_of_runs_names() -> None:
    spec = RunSpec(
        experiment_file="", experiment_class="", values={}, working_directory="", num_workers=1, devices_per_node=1
    )
    assert (spec.call_timeout_s, spec.deadline_factor, spec.setup_timeout_s, spec.master_timeout_s) == (
        600,
        20,
        300,
        90,
    )
    assert (spec.drift_threshold, spec.samples, spec.verify_reallocations_every) == (1.5, 3, 100)
    assert (spec.checkpoint_failures, spec.saves, spec.keep_checkpoints) == (0, False, None)
    assert (master.HEARTBEAT_TIMEOUT_S, master.SUSPICIOUS_SILENCE_S, master.ALIVE_EVERY_S) == (60, 3, 5)
    assert (drift.WINDOW, replan.LEAST_GAIN, replan.EVALUATIONS) == (10, 0.05, 20_000)
    assert (supervisor.MASTER_SILENCE_S, server.MAX_GARBAGE, clocks.TOLERATED_S) == (60, 100, 0.25)


def test_each_kind_of_checkpoint_makes_a_run_save_before_its_end() -> None:
    fields = {
        "experiment_file": "", "experiment_class": "", "values": {}, "working_directory": "", "num_workers": 1,
        "devices_per_node": 1,
    }  # fmt: skip
    assert RunSpec(**fields, checkpoint_every_steps=3).saves
    assert RunSpec(**fields, checkpoint_every_minutes=3).saves


def test_the_longest_prediction_is_of_a_step_or_of_a_call() -> None:
    calls = {"a": CallPlan(devices=(0, 1), predicted_s=7.0), "b": CallPlan(devices=(0, 1))}
    for step_s, longest_s in ((None, 7.0), (3.0, 7.0), (9.0, 9.0)):
        plan = ExecutionPlan(num_devices=1, calls=calls, predicted_step_s=step_s)
        spec: Any = SimpleNamespace(call_timeout_s=2.0, deadline_factor=5.0)
        assert Run(spec, None, plan).deadlines == Deadlines(2.0, 5.0, longest_s)
