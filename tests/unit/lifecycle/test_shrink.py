"""Who is blamed for failures, what is asked for about lost workers, and the plans for those that are left."""

from pathlib import Path

import pytest

from realhf.base.errors import UserError
from realhf.dataflow.plan import CallPlan, ExecutionPlan, plan_digest, save_plan
from realhf.lifecycle.new import new_run
from realhf.lifecycle.replan import planned_task
from realhf.lifecycle.request import RunRequest
from realhf.lifecycle.shrink import Suspects, plan_for_fewer
from realhf.planning.request import unwatched
from tests.unit.lifecycle.requests import request_of

CALLS = ("actor_generate", "actor_train_step", "reference_inference", "reward_inference", "critic_inference")
PLAN = "tests/plans/dp4.json"


def fallback(path: Path, num_devices: int, staleness: int = 0) -> Path:
    """All calls on the first device."""
    calls = {name: CallPlan(devices=(0, 1)) for name in (*CALLS, "critic_train_step")}
    save_plan(ExecutionPlan(num_devices=num_devices, calls=calls, staleness=staleness), path)
    return path


def asked(*words: str | Path) -> RunRequest:
    return request_of("experiments/ppo.py", "--steps", "3", *words)


def test_the_largest_fallback_plan_that_fits_else_a_search(tmp_path: Path) -> None:
    two, three = (fallback(tmp_path / f"{n}.json", n) for n in (2, 3))
    words = ("--plan", PLAN, "--recover", "auto", "--evaluations", "200")
    request = asked(*words, "--fallback-plan", two, "--fallback-plan", three, "--min-workers", "1")
    run = new_run(request)
    assert request.recovery.least_workers == 1
    assert asked(*words, "--fallback-plan", two, "--fallback-plan", three).recovery.least_workers == 2
    assert asked(*words).recovery.least_workers is None
    plans = {left: plan_for_fewer(run, request, left, unwatched)[0] for left in (3, 2, 1)}
    assert {left: plan.num_devices for left, plan in plans.items()} == {3: 3, 2: 2, 1: 1}
    assert plans[3].calls["actor_generate"].predicted_s is not None
    searched, hardware = plan_for_fewer(run, asked(*words, "--min-workers", "1"), 2, unwatched)
    assert run.spec.hardware
    assert hardware.device_memory_bytes > run.spec.hardware.device_memory_bytes, "two share what four had"
    assert searched.num_devices == 2
    assert searched.rationale is not None
    assert plan_digest(searched) != plan_digest(plans[2])


def test_fewer_workers_make_rollouts_as_stale(tmp_path: Path) -> None:
    stale, fresh = (fallback(tmp_path / f"{k}.json", 3 - k, staleness=k) for k in (1, 0))
    run = new_run(asked("--plan", stale, "--recover", "auto", "--min-workers", "1", "--batch-size", "8"))
    resumed = asked("--recover", "auto", "--staleness-up-to", "2", "--evaluations", "200", "--batch-size", "8")
    plan, _ = plan_for_fewer(run, resumed, 1, unwatched)
    assert (plan.num_devices, plan.staleness) == (1, 1)
    assert "actor_rollout" in plan.models
    again = planned_task(run, {})
    assert (again.staleness, again.more_stale) == (1, ()), "and so does a run that is planned again"
    words = ("--plan", fresh, "--recover", "auto", "--fallback-plan", stale)
    with pytest.raises(UserError, match=r"1\.json says staleness=1 and the run's plan 0; make one with the same"):
        new_run(asked(*words))


def test_fewer_workers_keep_the_memory_that_was_given() -> None:
    run = new_run(asked("--plan", PLAN, "--recover", "auto", "--memory-gb", "3", "--min-workers", "1"))
    resumed = asked("--recover", "auto", "--evaluations", "200")  # which does not say it again
    _, hardware = plan_for_fewer(run, resumed, 2, unwatched)
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
    with pytest.raises(UserError, match=message):
        new_run(asked("--plan", PLAN, *(plan if word == "PLAN" else word for word in words)))


def test_suspects_by_hand() -> None:
    suspects = Suspects()
    assert not suspects.failed(3, [0, 1], 4)
    assert not suspects.failed(4, [1], 4), "a step was made since"
    assert not suspects.failed(4, [], 4), "nobody was to blame"
    assert not suspects.failed(3, [1], 4)
    assert suspects.failed(2, [1, 2], 4) == {1}
    assert not Suspects().failed(0, [1], 2)
    of_all = Suspects()
    assert not of_all.failed(0, [0, 1], 2)
    assert not of_all.failed(0, [0, 1], 2), "what all fail in is nobody's fault"
