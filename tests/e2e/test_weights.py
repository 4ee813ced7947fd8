"""Every call says with which weights it computed; a run whose weights are not what they should be ends with a name."""

from pathlib import Path

import msgspec
import pytest

from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from realhf.geometry.parameters import parameter_count
from realhf.rundir import checkpoints
from realhf.rundir.checkpoints import STATE_FILE, RunState, step_folder
from tests.e2e.forked import quickly_failed, quickly_finished
from tests.e2e.runs import FinishedRun, realhf
from tests.e2e.weights_job import TINY

pytestmark = pytest.mark.distributed

JOB = "../tests/e2e/weights_job"
PARAMETER = "model.layers.1.mlp.down_proj.weight"
BOTH, SECOND = CallPlan(devices=(0, 2), dp=2), CallPlan(devices=(1, 1))
TENSOR, PIPELINE = CallPlan(devices=(0, 2), tp=2), CallPlan(devices=(0, 2), pp=2)


def plan(generate: CallPlan, reference: CallPlan, train: CallPlan) -> ExecutionPlan:
    calls = {"actor_generate": generate, "reference_inference": reference, "actor_train_step": train}
    return ExecutionPlan(num_devices=2, calls=calls, max_steps_in_flight=1)


def digests(run: FinishedRun, call: str, name: str = "weights") -> list[str]:
    return [line["calls"][call][name] for line in run.metrics]


def words(folder: Path, planned: ExecutionPlan) -> list[str]:
    folder.mkdir(exist_ok=True)
    save_plan(planned, folder / "plan.json")
    return ["--plan", str(folder / "plan.json")]


def test_digests_are_of_versions_and_of_no_layout(tmp_path: Path) -> None:
    """And a run goes on, under another plan, with the weights that its checkpoint has; with others it does not."""
    own = words(tmp_path, plan(TENSOR, SECOND, BOTH))
    run = quickly_finished(tmp_path / "run", JOB, *own, "--checkpoint-every", "2")
    generated, made = digests(run, "actor_generate"), digests(run, "actor_train_step", "new_weights")
    assert generated == digests(run, "actor_train_step")
    assert generated[1:] == made[:-1]
    assert len({*generated, made[-1]}) == 5, "every step makes others"
    assert set(digests(run, "reference_inference")) == {generated[0]}, "random weights of one seed"
    other = quickly_finished(tmp_path / "other", JOB, *words(tmp_path / "p", plan(PIPELINE, BOTH, TENSOR)))
    assert digests(other, "actor_generate")[0] == generated[0]
    again = [*words(tmp_path / "p", plan(PIPELINE, BOTH, TENSOR)), "--resume", "--checkpoint-every", "2"]
    longer = quickly_finished(tmp_path / "run", JOB, *again, "--steps", "6")
    assert digests(longer, "actor_generate")[4] == made[-1]
    trained = [line["calls"]["actor_train_step"] for line in longer.metrics]
    assert len({line["new_states"] for line in trained}) == 6, "every step makes others"
    assert [i for i, line in enumerate(trained) if "states" in line] == [0, 4], "at the starts"
    assert trained[4]["states"] == trained[3]["new_states"], "in another layout"
    assert trained[4]["states"] != trained[5]["new_states"]
    exported = realhf("convert", tmp_path / "run", tmp_path / "exported")
    assert f"weights {digests(longer, 'actor_train_step', 'new_weights')[-1]}" in exported.stdout, exported.stderr

    path = step_folder(tmp_path / "run/checkpoints", 6) / STATE_FILE
    whole = path.read_bytes()
    _with_other_sum(path, "states", "actor", f"{PARAMETER}@exp_avg")
    text = quickly_failed(tmp_path / "run", JOB, *again, "--steps", "8")
    assert (
        "actor_train_step of step 7 has other values of actor than version 6 has, which the checkpoint after step 6 "
        f"had: in {PARAMETER}@exp_avg, on workers 0, 1;" in text
    )
    path.write_bytes(whole)
    _with_other_sum(path, "weights", "reference", PARAMETER)
    text = quickly_failed(tmp_path / "run", JOB, *again, "--steps", "8")
    assert (
        "reference_inference of step 7 has other values of reference than version 0 has, which the checkpoint after "
        f"step 6 had: in {PARAMETER}, on workers 0, 1;" in text
    )


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "bit in a copy",
            "actor_generate of step 2 has other values of actor than version 1 has, which the result of "
            f"actor_train_step of step 1 had: in {PARAMETER}, on worker",
        ),
        (
            "move left out",
            "actor_generate of step 2: worker 1 has other values than worker 0 in version 1 of actor, in "
            "model.layers.0.input_layernorm.weight, the part of shape (32,) at offset (0,); a memory or a link changed",
        ),
        (
            "bit of one rank",
            "the result of actor_train_step of step 2: worker 1 has other values than worker 0 in version 2 of actor, "
            f"in {PARAMETER}, the part of shape (32, 48) at offset (0, 0); a memory or a link changed them: go on",
        ),
        (
            "bit of the reference",
            "reference_inference of step 3 has other values of reference than version 0 has, which reference_inference "
            f"of step 1 had: in {PARAMETER}, on worker 1; a memory or a link changed them, or they are of another step",
        ),
    ],
)
def test_a_fault_ends_the_run_with_call_version_parameter_and_worker(tmp_path: Path, fault: str, said: str) -> None:
    given = [*words(tmp_path, plan(TENSOR, SECOND, BOTH)), "--fault", fault]
    every = "1" if "reference" in fault else "0"  # what nothing writes is summed up again only as often as that says
    text = quickly_failed(tmp_path / "run", JOB, *given, "--verify-reallocations-every", every)
    assert said in text


# The actor is copied from device 0 to device 1.
AWAY = plan(SECOND, SECOND, CallPlan(devices=(0, 1)))
SLOW = ("--lr", "1e-7", "--dtype", "bfloat16")


def test_only_what_changed_is_sent_and_the_weights_are_the_same(tmp_path: Path) -> None:
    """Learning rates as of RL in bfloat16: few roundings change. The metrics have the bytes of every move."""
    small = (*SLOW, "--verify-reallocations-every", "1")
    whole = quickly_finished(tmp_path / "whole", JOB, *words(tmp_path / "a", AWAY), *small)
    changes = msgspec.structs.replace(AWAY, changes=("actor_generate",))
    run = quickly_finished(tmp_path / "run", JOB, *words(tmp_path / "b", changes), *small)
    assert digests(run, "actor_generate") == digests(whole, "actor_generate")
    assert len(set(digests(run, "actor_generate"))) == 4, "every step makes others"
    first, *others = (line["calls"]["actor_generate"]["moved"] for line in run.metrics)
    assert first["bytes"] == first["whole_bytes"] == 2 * parameter_count(TINY)
    assert first["changed_share"] == 1
    for moved in others:
        assert moved["whole_bytes"] == first["whole_bytes"]
        assert 0 < moved["bytes"] < 0.05 * first["whole_bytes"]
        assert 0 < moved["changed_share"] < 0.02
    assert all("moved" not in line["calls"]["actor_generate"] for line in whole.metrics)
    assert all("moved" not in line["calls"]["actor_train_step"] for line in run.metrics)


def test_a_wrong_change_ends_the_run(tmp_path: Path) -> None:
    """Also where the move is not verified: the copy's weights are compared with those that training made."""
    changes = msgspec.structs.replace(AWAY, changes=("actor_generate",))
    given = [*words(tmp_path, changes), *SLOW, "--fault", "wrong change", "--verify-reallocations-every", "0"]
    text = quickly_failed(tmp_path / "run", JOB, *given)
    assert (
        "actor_generate of step 2 has other values of actor than version 1 has, which the result of actor_train_step "
        "of step 1 had: in " in text
    )


def _with_other_sum(path: Path, field: str, model: str, parameter: str) -> None:
    """Changes a digest in a checkpoint's state, as if its weights or optimizer states had been others."""
    state = msgspec.json.decode(path.read_bytes(), type=RunState)
    saved = getattr(state, field)
    wrong = msgspec.structs.replace(saved[model], sums=saved[model].sums | {parameter: f"{1:016x}"})
    state = msgspec.structs.replace(state, **{field: saved | {model: wrong}})
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(state, sha256=checkpoints._digest(state))))
