"""Copies from other copies: what a plan may say, what waits for what, and what may run meanwhile."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from realhf.base.errors import UserError
from realhf.dataflow.copies import running_beside, takers_of, with_copies
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import CallPlan, ExecutionPlan, OrderEntry, load_plan, plan_digest, save_plan
from realhf.dataflow.plan_checks import check_plan
from realhf.planning.task import with_staleness
from tests.unit.api.calls import call

# The actor generates, and reads what it generated twice; a critic that is trained too, and a reward model.
GRAPH = DataflowGraph(
    [
        call("actor", GENERATE, ["prompt"], ["seq"], name="rollout"),
        call("actor", INFERENCE, ["seq"], ["logprob"], name="again"),
        call("actor", INFERENCE, ["seq"], ["judged"], name="judge"),
        call("reward", INFERENCE, ["seq"], ["score"], name="reward"),
        call("critic", TRAIN_STEP, ["score"], name="critic"),
        call("actor", TRAIN_STEP, ["logprob", "judged", "score"], name="train"),
    ],
    ["prompt"],
)
HOME, WIDE, NARROW = CallPlan(devices=(0, 2), tp=2), CallPlan(devices=(0, 4), dp=4), CallPlan(devices=(2, 2), tp=2)


def plan_of(*, order: tuple[OrderEntry, ...] = (), offload: tuple[str, ...] = (), **calls: CallPlan) -> ExecutionPlan:
    rest = dict.fromkeys(("reward", "critic", "train"), HOME)
    places = {"rollout": WIDE, "again": NARROW, "judge": HOME} | rest | calls
    return ExecutionPlan(num_devices=4, calls=places, order=order, offload=offload)


def of(source: str | None, plan: CallPlan) -> CallPlan:
    return msgspec.structs.replace(plan, copy_from=source)


def test_a_plan_file_says_it_and_older_ones_do_not(tmp_path: Path) -> None:
    plan = plan_of(again=of("rollout", NARROW))
    check_plan(plan, GRAPH, 8)
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert plan.copies == {"again": "rollout"}
    assert plan.copies_text == "again from the copy of rollout"
    older = msgspec.json.decode((tmp_path / "plan.json").read_bytes())
    for entry in older["calls"].values():
        del entry["copy_from"]
    (tmp_path / "older.json").write_bytes(msgspec.json.encode(older))
    assert load_plan(tmp_path / "older.json") == plan_of()


def test_the_digest_of_a_plan_without_is_what_it_was() -> None:
    assert plan_digest(plan_of())[:12] == "ae19f44d684d"
    assert plan_digest(plan_of(again=of("rollout", NARROW))) != plan_digest(plan_of())


ALL_WIDE = {"again": of("rollout", WIDE), "judge": of("rollout", WIDE)}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown call": (
        {"again": of("rolout", NARROW)},
        "again: copy_from='rolout' is no other call of its model 'actor' with a copy; choose from rollout, or leave it "
        "out: the copy then comes from the model's home",
    ),
    "a call of another model": ({"again": of("reward", NARROW)}, "is no other call of its model 'actor' with a copy"),
    "a call of another model where the own has no copies": (
        {"critic": of("rollout", HOME)},
        "critic: copy_from='rollout' is no other call of its model 'critic' with a copy; leave it out: the copy then",
    ),
    "itself": ({"again": of("again", NARROW)}, "again: copy_from='again' is no other call of its model 'actor'"),
    "a call that needs none": (
        {"judge": of("rollout", HOME)},
        "judge: copy_from='rollout', but its layout is that of its model's home and needs no copy; leave it out",
    ),
    "a source at home": (
        {"rollout": HOME, "again": of("rollout", NARROW)},
        "again: copy_from='rollout', which has no copy: it runs in the home of model 'actor'; leave it out",
    ),
    "a copy of a copy of a copy": (
        {"again": of("rollout", NARROW), "judge": of("again", CallPlan(devices=(0, 1)))},
        "judge: copy_from='again', whose own copy is from rollout; give copy_from='rollout' here, too",
    ),
    "a model that waits in host memory": (
        {"again": of("rollout", NARROW), "offload": ("actor",)},
        "again: copy_from='rollout', but model 'actor' waits in host memory, from where all its copies come; leave "
        "copy_from out, or take the model out of offload",
    ),
    "a source that comes later": (
        {"rollout": of("again", WIDE)},
        "rollout: copy_from='again', which runs after it; leave it out, or give again copy_from='rollout'",
    ),
    "a call that would write into the kept copy": (
        {"again": of("rollout", NARROW), "judge": WIDE},
        "again: copy_from='rollout', whose copy is kept meanwhile, but judge has the same layout and makes a copy of "
        "its own; give judge copy_from='rollout' too, or another layout",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_sources(name: str) -> None:
    changes, message = BAD[name]
    with pytest.raises(UserError, match=re.escape(message)):
        check_plan(plan_of(**changes), GRAPH, 8)


def test_sources_with_another_version_of_the_parameters() -> None:
    """Generation that runs ahead has older parameters than the rest."""
    plan = plan_of(again=of("rollout", NARROW))
    with pytest.raises(UserError, match="copy_from='rollout', which uses another version of the parameters"):
        check_plan(plan, with_staleness(GRAPH, 1), 8)


def test_several_take_from_one() -> None:
    plan = plan_of(again=of("rollout", NARROW), judge=of("rollout", WIDE))
    check_plan(plan, GRAPH, 8)
    assert takers_of(plan.copies, "rollout") == ["again", "judge"]
    check_plan(plan_of(**ALL_WIDE), GRAPH, 8)
    assert takers_of({"a": "one", "b": "other", "c": "one"}, "one") == ["a", "c"]


def test_the_source_waits_for_the_takers_of_the_step_before() -> None:
    graph = with_copies(GRAPH, {"again": "rollout"})
    assert {(e.parent, e.child, e.steps_back) for e in graph.edges if e.kind == "copy"} == {
        ("rollout", "again", 0),
        ("again", "rollout", 1),
    }
    assert GRAPH is with_copies(GRAPH, {})
    assert not any(edge.kind == "copy" for edge in GRAPH.edges)
    frozen = DataflowGraph(
        [
            call("judge", INFERENCE, ["x"], [out], name=name)
            for name, out in (("home", "a"), ("one", "b"), ("two", "c"))
        ],
        ["x"],
    )
    calls = {"home": HOME, "one": WIDE, "two": of("one", NARROW)}
    order = tuple(OrderEntry(call=name, steps_back=back) for name, back in (("one", 0), ("home", 0), ("two", 1)))
    plan = ExecutionPlan(num_devices=4, calls=calls, order=order)
    check_plan(msgspec.structs.replace(plan, calls=calls | {"two": NARROW}), frozen, 8)
    with pytest.raises(UserError, match="order: one needs the result of two but is scheduled before it"):
        check_plan(plan, frozen, 8)


def test_what_may_run_while_a_copy_is_kept() -> None:
    """Training of the actor is behind the taker, and before the next copy; the critic's may take until that."""
    assert running_beside(GRAPH, {"again": "rollout"}, "rollout") == {"again", "judge", "reward", "critic"}
    in_a_row = DataflowGraph(
        [
            call("actor", GENERATE, ["prompt"], ["seq"], name="rollout"),
            call("reward", INFERENCE, ["seq"], ["score"], name="reward"),
            call("actor", INFERENCE, ["score"], ["logprob"], name="again"),
            call("critic", INFERENCE, ["logprob"], ["value"], name="critic"),
            call("actor", TRAIN_STEP, ["value"], name="train"),
        ],
        ["prompt"],
    )
    assert running_beside(in_a_row, {"again": "rollout"}, "rollout") == {"reward", "again"}
    two_takers = DataflowGraph(
        [
            call("actor", GENERATE, ["prompt"], ["seq"], name="rollout"),
            call("actor", INFERENCE, ["seq"], ["judged"], name="early"),
            call("reward", INFERENCE, ["judged"], ["score"], name="reward"),
            call("actor", INFERENCE, ["score"], ["logprob"], name="again"),
            call("actor", TRAIN_STEP, ["logprob"], name="train"),
        ],
        ["prompt"],
    )
    copies = {"early": "rollout", "again": "rollout"}
    assert running_beside(two_takers, copies, "rollout") == {"early", "reward", "again"}, "behind one, before the other"
    assert running_beside(two_takers, {"early": "rollout"}, "rollout") == {"early"}
