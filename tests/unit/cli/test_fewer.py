"""What is said about lost workers on the command line, and the plans for those that are left."""

from pathlib import Path

import pytest

from realhf.base.errors import UserError
from realhf.cli import parser
from realhf.cli.fewer import plan_for_fewer, recovery_of
from realhf.cli.runs import new_run
from realhf.dataflow.plan import CallPlan, ExecutionPlan, plan_digest, save_plan

CALLS = ("actor_generate", "actor_train_step", "reference_inference", "reward_inference", "critic_inference")
PLAN = "tests/plans/dp4.json"


def fallback(path: Path, num_devices: int) -> Path:
    """All calls on the first device."""
    calls = {name: CallPlan(devices=(0, 1)) for name in (*CALLS, "critic_train_step")}
    save_plan(ExecutionPlan(num_devices=num_devices, calls=calls), path)
    return path


def parse(*words: str | Path):
    arguments, rest = parser("run").parse_known_args(["run", "experiments/ppo.py", *map(str, words)])
    arguments.overrides = ["--steps", "3"]
    assert not rest
    return arguments


def test_the_largest_fallback_plan_that_fits_else_a_search(tmp_path: Path) -> None:
    two, three = (fallback(tmp_path / f"{n}.json", n) for n in (2, 3))
    words = ("--plan", PLAN, "--recover", "auto", "--evaluations", "200")
    arguments = parse(*words, "--fallback-plan", two, "--fallback-plan", three, "--min-workers", "1")
    run = new_run(arguments)
    assert recovery_of(arguments, lambda: run).min_workers == 1
    assert recovery_of(parse(*words, "--fallback-plan", two, "--fallback-plan", three), lambda: run).min_workers == 2
    assert recovery_of(parse(*words), lambda: run).min_workers is None
    plans = {left: plan_for_fewer(arguments, run, left)[0] for left in (3, 2, 1)}
    assert {left: plan.num_devices for left, plan in plans.items()} == {3: 3, 2: 2, 1: 1}
    assert plans[3].calls["actor_generate"].predicted_s is not None
    searched, hardware = plan_for_fewer(parse(*words, "--min-workers", "1"), run, 2)
    assert run.spec.hardware
    assert hardware.device_memory_bytes > run.spec.hardware.device_memory_bytes, "two share what four had"
    assert searched.num_devices == 2
    assert searched.rationale is not None
    assert plan_digest(searched) != plan_digest(plans[2])


def test_fewer_workers_keep_the_memory_that_was_given() -> None:
    run = new_run(parse("--plan", PLAN, "--recover", "auto", "--memory-gb", "3", "--min-workers", "1"))
    resumed = parse("--recover", "auto", "--evaluations", "200")  # which does not say it again
    _, hardware = plan_for_fewer(resumed, run, 2)
    assert hardware.device_memory_bytes == 3 * 2**30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--min-workers", "2"), "are for --recover auto; give it, or leave them out"),
        (("--recover", "auto", "--min-workers", "5"), "--min-workers 5 is more than the run's 4; give 4 or fewer"),
        (
            ("--recover", "auto", "--fallback-plan", "PLAN", "--min-workers", "3"),
            "is for 2 devices, which are not fewer than the run's 4 and at least 3;",
        ),
        (("--recover", "auto", "--fallback-plan", PLAN), "is for 4 devices, which are not fewer than the run's 4"),
    ],
)
def test_what_does_not_fit_is_found_before_anything_starts(
    words: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    plan = str(fallback(tmp_path / "two.json", 2))
    arguments = parse("--plan", PLAN, *(plan if word == "PLAN" else word for word in words))
    with pytest.raises(UserError, match=message):
        new_run(arguments)
