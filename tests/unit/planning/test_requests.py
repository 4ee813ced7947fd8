"""What somebody asks of the planner: defaults, bounds, requests that contradict themselves."""

from dataclasses import MISSING, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realhf.architecture.compute import MODES
from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError
from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.osdp import request as osdp
from realhf.planning.model.osdp.problem import Links, Operator, OsdpProblem
from realhf.planning.model.osdp.request import OsdpRequest
from realhf.planning.problem.native import SearchRequest
from realhf.planning.request import DevicesRequest, Measured, PlanRequest, SearchBudget, unwatched
from realhf.planning.what_if import WhatIf

OSDP: dict[str, Any] = {"model": "llama7b", "devices": 4, "memory_gb": 2.0}
BUDGET = {"budget": SearchBudget(evaluations=1)}
LARGE_OPERATOR = Operator(name="w", kind="w", parameter_bytes=2**30, gradient_bytes=2**30, optimizer_bytes=2**31)


@pytest.mark.parametrize(
    ("request_type", "fixed", "field", "least", "most"),
    [
        (OsdpRequest, OSDP, "devices", 2, 4096),
        (OsdpRequest, OSDP, "memory_gb", 1e-6, 2**20),
        (OsdpRequest, OSDP, "batch", 1, 65_536),
        (OsdpRequest, OSDP, "max_batch", 1, 65_536),
        (OsdpRequest, OSDP, "sequence_length", 1, 1_048_576),
        (OsdpRequest, OSDP, "slices", 1, 64),
        (OsdpRequest, OSDP, "launch_us", 0, 1_000_000),
        (OsdpRequest, OSDP, "seconds", 0, 100_000),
        (DevicesRequest, {}, "num_workers", 1, 4096),
        (DevicesRequest, {}, "nodes", 1, 4096),
        (DevicesRequest, {}, "gpus_per_node", 1, 4096),
        (SearchBudget, {}, "evaluations", 1, 10**12),
        (SearchBudget, {}, "seconds", 0.01, 10**7),
        (PlanRequest, {}, "staleness_up_to", 0, 64),
        (SearchRequest, BUDGET, "seed", 0, 2**63 - 1),
        (SearchRequest, BUDGET, "threads", 1, 1024),
        (WhatIf, {}, "prompt_tokens", 1, None),
        (WhatIf, {}, "new_tokens", 1, None),
        (WhatIf, {}, "batch_size", 1, None),
        (WhatIf, {}, "staleness", 0, 64),
    ],
)
def test_numbers_have_bounds(request_type: Any, fixed: dict[str, Any], field: str, least: float, most: Any) -> None:
    good, bad = [least], [least - (1e-3 if least == 0.01 else 1e-7 if least == 1e-6 else 1)]
    if most is not None:
        good, bad = [least, most], [*bad, most + 1]
    for value in good:
        assert getattr(request_type(**fixed | {field: value}), field) == value
    for value in bad:
        with pytest.raises(UserError, match=rf"--{field.replace('_', '-')} .* is not from"):
            request_type(**fixed | {field: value})


def test_requests_that_say_nothing() -> None:
    assert vars(PlanRequest()) == {
        "devices": DevicesRequest(), "plan": None, "rule": None, "budget": SearchBudget(), "offload": None,
        "saves": False, "staleness_up_to": 0, "staleness": None, "moved_by": "auto", "send_changes": "auto",
            "measured": Measured(),
    }  # fmt: skip
    assert vars(DevicesRequest()) == {
        "num_workers": None, "nodes": 1, "gpus_per_node": None, "hardware": None, "memory_gb": None, "place": None,
        "cpu_only": False, "threads": None, "planned": None,
    }  # fmt: skip
    assert vars(Measured()) == {"profiles": None, "call_factors": {}, "changed_shares": {}, "ignores_runs": False}
    assert vars(SearchBudget()) == {"evaluations": None, "seconds": None}
    assert vars(SearchRequest(**BUDGET)) == {
        **BUDGET, "seed": 0, "threads": None, "single_moves": False, "proves": True, "starts": (),
    }  # fmt: skip
    unwatched("phase", "detail")


PLAN = ExecutionPlan(num_devices=1, calls={"a": CallPlan(devices=(0, 1))}, staleness=2)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_plan(PLAN, tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_a_plan_is_read_from_its_file_once(file: Path) -> None:
    request = PlanRequest(plan=file)
    assert request.given == PLAN
    file.unlink()
    assert request.given == PLAN
    assert PlanRequest().given is None


def test_the_stalenesses_that_a_plan_may_have(file: Path) -> None:
    assert PlanRequest(plan=file, staleness=1).stalenesses == (2,), "that of the given plan"
    assert PlanRequest(staleness_up_to=2).stalenesses == (0, 1, 2)
    assert PlanRequest(staleness_up_to=2, staleness=1).stalenesses == (1,)
    assert PlanRequest().stalenesses == (0,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"staleness_up_to": 1, "plan": True},
            "--staleness-up-to 1 is for the search of a plan; leave it out beside --plan, whose file says staleness=2",
        ),
        (
            {"staleness_up_to": 1, "rule": "split"},
            "--staleness-up-to 1 is for the search of a plan; leave it out beside --rule",
        ),
        (
            {"offload": ("ref",), "plan": True},
            "--offload is for the search of a plan; write the models into the file of --plan instead",
        ),
        ({"rule": "split", "plan": True}, "--rule split and --plan {} are both plans: give one of them"),
    ],
)
def test_a_plan_beside_what_is_for_a_search(fields: dict[str, Any], message: str, file: Path) -> None:
    with pytest.raises(UserError) as error:
        PlanRequest(**fields | ({"plan": file} if "plan" in fields else {}))
    assert str(error.value) == message.format(file)


def test_what_may_stand_together(file: Path) -> None:
    PlanRequest(plan=file, offload=())
    PlanRequest(offload=("ref",), rule="split", staleness=1)
    PlanRequest(offload=("ref",), staleness_up_to=1)


# --- modes of operators


def test_the_problem_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(osdp, "decoder_problem", lambda *words, **more: asked.append((*words, more)) or "problem")
    request = OsdpRequest(**OSDP, recompute=True, prefetch=True, modes=MODES[:1], dtype="float32", launch_us=1)
    assert request.problem() == "problem"
    [(model, given, training)] = asked
    hardware = load_hardware("h100")
    assert isinstance(model, DecoderConfig)
    assert model.hidden_size == 4096
    assert training == {"sequence_length": 2048, "flops": hardware.flops("float32"), "dtype": "float32"}
    assert given == OsdpProblem(
        operators=(), links=Links.ring(hardware, 4, launch_s=1e-6, overlap=1.0), memory_bytes=2 * 2**30,
        modes=MODES[:1], recompute=True, prefetch=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "slices", "batches"),
    [
        ({}, [1, 2, 4], range(1, 513)),
        ({"slices": 6, "batch": 7}, [1, 2, 4, 6], range(7, 8)),
        ({"slices": 1, "max_batch": 3}, [1], range(1, 4)),
        ({"slices": 3}, [1, 2, 3], range(1, 513)),
    ],
)
def test_operators_whole_and_in_slices(
    fields: dict[str, Any], slices: list[int], batches: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the plans with one mode for all operators the fastest for a sample counts, where one fits."""
    whole = OsdpProblem(operators=(LARGE_OPERATOR,), links=Links.ring(load_hardware("h100"), 4), memory_bytes=1)
    monkeypatch.setattr(OsdpRequest, "problem", lambda self: whole)
    monkeypatch.setattr(osdp, "sliced", lambda _, number: number)

    def solve(problems: list[OsdpProblem], sizes: range, *, time_limit_s: float) -> str:
        [asked] = problems
        assert [each.cuts for each in asked.operators] == [tuple(slices)]
        assert (sizes, time_limit_s) == (batches, 5.0)
        return "best"

    def uniform(number: int, mode: str, sizes: range) -> Any:
        assert sizes == batches
        fits = mode == MODES[0] or (mode == MODES[1] and number > 1)
        return SimpleNamespace(seconds_per_sample=abs(number - 2.1)) if fits else None

    monkeypatch.setattr(osdp, "solve", solve)
    monkeypatch.setattr(osdp, "uniform_plan", uniform)
    plan, by_mode = osdp.choose(replace(OsdpRequest(**OSDP, **fields), seconds=5.0))
    assert (plan, set(by_mode)) == ("best", set(MODES))
    fastest = [min(abs(number - 2.1) for number in slices)]
    assert [by_mode[MODES[0]].seconds_per_sample] == fastest  # type: ignore[union-attr]
    assert (by_mode[MODES[1]] is None) == (slices == [1])
    assert by_mode[MODES[2]] is None


def test_a_request_of_operators_needs_model_devices_and_memory() -> None:
    missing = [field.name for field in fields(OsdpRequest) if field.default is MISSING]
    assert missing == ["model", "devices", "memory_gb"]
    assert OsdpRequest(**OSDP).modes == MODES
