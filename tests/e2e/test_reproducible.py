"""With `reproducible="layout"` the bits of rollouts, statistics and parameters are the same under every plan."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.random_layouts import draw
from realhf.base.errors import UserError
from realhf.cpu import in_order
from realhf.data import sort_task
from realhf.dataflow.plan import CallPlan, save_plan
from realhf.experiments import ready_file
from realhf.launch.local import LocalLauncher
from realhf.machine.host import read_host
from realhf.planning import here, planner
from tests.e2e.forked import quickly_finished
from tests.e2e.runs import FinishedRun, realhf, realhf_here
from tests.e2e.test_algorithms_plans import SMALL, STEPS, Pattern, Runs, at, statistics
from tests.unit.machine.nvml import H100, stand_in

pytestmark = pytest.mark.distributed

DTYPES = ("float32", "bfloat16")
# dp x micro-batches of a training is 4: the parts of a mini-batch's gradient.
ONE = Pattern((at(0, 4),), (at(0),), (at(0),))
PATTERNS = {
    "two, mixed": Pattern(
        train=(at(0, 2, dp=2), at(0, 4, tp=2)),
        generate=(at(0, 2, tp=2), at(0, dp=2)),
        infer=(at(1), at(0, dp=2), at(0, pp=2), at(0, 2, tp=2)),
    ),
    "four, mixed": Pattern(
        train=(at(0, 2, dp=2, tp=2), at(0, dp=4), at(0, 4, pp=2, tp=2)),
        generate=(at(0, dp=2, tp=2), at(0, 2, dp=4)),
        infer=(at(0, tp=2, pp=2), at(2, dp=2), at(0, 2, tp=4), at(3)),
    ),
    "four, deep": Pattern(
        train=(at(0, 4, tp=4), at(0, 2, dp=2, pp=2)), generate=(at(0, pp=2, dp=2),), infer=(at(0, dp=4),)
    ),
}


def of(runs: Runs, folder: Path, name: str, pattern: Pattern) -> FinishedRun:
    return runs.run(folder, name, pattern, "--steps", str(STEPS))


DIGESTS = ("weights", "new_weights", "new_states")


def digests(run: FinishedRun) -> list[Any]:
    """By step and call of the weights that it used, of the weights and states that it made, and of all outputs."""
    kept = [{name: [call.get(key) for key in DIGESTS] for name, call in line["calls"].items()} for line in run.metrics]
    return [*kept, *map(json.loads, (run.path / "outputs.jsonl").read_text().splitlines())]


QUICK = [("grpo", "bfloat16", "two, mixed"), ("ppo", "float32", "four, mixed")]
GRID = [(name, dtype, place) for name in ("sft", "grpo", "ppo") for dtype in DTYPES for place in PATTERNS]


@pytest.mark.parametrize(
    ("name", "dtype", "place"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in GRID],
)
def test_every_bit_is_the_same_under_every_plan(name: str, dtype: str, place: str, tmp_path: Path) -> None:
    runs = Runs(tmp_path, "--dtype", dtype, "--reproducible", "layout", one=ONE)
    expected = of(runs, tmp_path / "one", name, ONE)
    run = of(runs, tmp_path / "other", name, PATTERNS[place])
    assert digests(run) == digests(expected)
    assert statistics(run) == statistics(expected)
    if name == "grpo":
        assert expected.metrics[0]["kl"] == 0, "log-probabilities of rollouts are those of the reference's pass"


TRAININGS = {"tp": at(0, 4, tp=2), "dp": at(0, 2, dp=2), "both": at(0, 2, dp=2, tp=2)}


@pytest.mark.parametrize(
    ("name", "dtype", "places"),
    [
        ("distill", "bfloat16", ("tp",)),
        pytest.param("distill", "float32", (*TRAININGS,), marks=pytest.mark.slow),
        pytest.param("distill", "bfloat16", ("dp", "both"), marks=pytest.mark.slow),
        pytest.param("distill, few tokens", "bfloat16", ("tp", "both"), marks=pytest.mark.slow),
    ],
)
def test_the_divergence_of_a_distillation_is_the_same_under_tensor_parallelism(
    name: str, dtype: str, places: tuple[str, ...], tmp_path: Path
) -> None:
    runs = Runs(tmp_path, "--dtype", dtype, "--reproducible", "layout", one=ONE)
    expected = runs.reference(name, 3)
    for place in places:
        pattern = Pattern((TRAININGS[place],), (at(0, tp=2),), (at(1),))
        run = runs.run(tmp_path / place, name, pattern, "--steps", "3")
        assert digests(run) == digests(expected), place
        assert statistics(run) == statistics(expected), place


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(8), 28])  # 28: biases, whose gradients tensor parallelism cut
def test_every_bit_is_the_same_in_pairs_of_plans_that_are_drawn(seed: int, tmp_path: Path) -> None:
    drawn = draw(seed, sort_task.ensure(tmp_path / "data"))
    runs = []
    for place, plan in enumerate(drawn.plans):
        save_plan(plan, tmp_path / f"{place}.json")
        words = (*drawn.words, "--plan", tmp_path / f"{place}.json")
        runs.append(quickly_finished(tmp_path / f"run-{place}", drawn.experiment, *words))
    first, second = runs
    assert digests(first) == digests(second)
    assert statistics(first) == statistics(second)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--dtype", "float64"),
            "model 'actor' under reproducible='layout': its kernels have no dtype float64; choose",
        ),
        (
            ("--actor.compute.data-parallel", "fsdp"),
            "--actor.compute.data-parallel='fsdp', --actor.compute.sequence-parallel",
        ),
        (("--reproducible", "layouts"), "layouts"),
    ],
)
def test_what_depends_on_the_layout_is_refused(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    data = sort_task.ensure(tmp_path / "data")
    own = ("--data", data / "sft.jsonl", "--tokenizer", data / "tokenizer.json", "--run-dir", tmp_path / "run")
    done = realhf("run", "sft", "--reproducible", "layout", *own, *words)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


NO_EXPERTS = "experts=4 have no kernels for GPUs whose sums have one order; leave reproducible='layout' out, or run on"
EXPERTS = ("--architecture.experts.count", "4", "--architecture.experts.per-token", "2")
WITHOUT_KERNELS = "realhf is installed here without its C++ kernels, whose sums have one order; leave"


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("experts on a gpu", f"on nvidia-h100-80gb-hbm3: {NO_EXPERTS}"),
        ("without kernels", WITHOUT_KERNELS),
        ("on threads", "with 2 threads in a worker: sums over threads depend on their number; set OMP_NUM_THREADS=1"),
    ],
)
def test_a_machine_that_adds_up_otherwise_is_refused_before_a_process_starts(
    place: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = sort_task.ensure(tmp_path / "data")
    stand_in(monkeypatch, tmp_path, [H100] if place == "experts on a gpu" else [])
    monkeypatch.setenv("OMP_NUM_THREADS", "2" if place == "on threads" else "1")
    monkeypatch.setattr(in_order, "has_kernels", lambda: place != "without kernels")
    monkeypatch.setattr(planner, "search_plan", lambda *_: pytest.fail("a plan is searched"))
    monkeypatch.setattr(LocalLauncher, "start", lambda *_: pytest.fail("a process starts"))
    own = ("--data", data / "sft.jsonl", "--tokenizer", data / "tokenizer.json", "--num-workers", "1", *EXPERTS)
    for words in (("run", "sft", "--run-dir", tmp_path / "run"), ("plan", "sft"), ("profile", "sft", "--force")):
        done = realhf_here(*words, *own, "--reproducible", "layout")
        assert done.returncode == 2
        assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "run").exists()


def test_a_plan_for_gpus_is_refused_by_their_description_and_none_asks_this_processor_for_other_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = sort_task.ensure(tmp_path / "data")
    monkeypatch.setattr(in_order, "has_kernels", lambda: False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ("plan", "sft", "--data", data / "sft.jsonl", "--tokenizer", data / "tokenizer.json", "--evaluations", "10")
    on_gpus, on_nodes = (
        realhf_here(*words, *EXPERTS, "--reproducible", "layout", "--cluster", at) for at in ("h100-1x4", "cpu-1x2")
    )
    assert f"on h100: {NO_EXPERTS}" in " ".join(on_gpus.stderr.split())
    assert on_nodes.returncode == 0, on_nodes.stderr


def test_a_run_goes_on_only_where_its_workers_would_add_up_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Runs(tmp_path, "--reproducible", "layout", one=ONE).reference("sft")
    monkeypatch.setattr(in_order, "has_kernels", lambda: False)
    done = realhf_here("run", "sft", "--run-dir", run.path, "--resume", "--steps", "9")
    assert done.returncode == 2
    assert WITHOUT_KERNELS in " ".join(done.stderr.split())


def test_a_run_that_goes_on_with_one_worker_has_one_thread_where_there_are_more_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here, "read_host", lambda: replace(read_host(), cores=4))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    data = sort_task.ensure(tmp_path / "data")
    words = ("--data", data / "sft.jsonl", "--tokenizer", data / "tokenizer.json", *SMALL, "--batch-size", "8")
    words = (*words, "--reproducible", "layout", "--checkpoint-every", "1", "--evaluations", "20")
    quickly_finished(tmp_path / "run", ready_file("sft"), *words, "--num-workers", "2", "--steps", "1")
    alone = quickly_finished(
        tmp_path / "run", ready_file("sft"), *words, "--num-workers", "1", "--steps", "2", "--resume"
    )
    assert [line["num_workers"] for line in alone.metrics] == [2, 1]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            at(0),
            "dp=1 x micro_batches=1 is not 4, the parts in which the gradient of a mini-batch is added up; choose dp",
        ),
        (at(0, pp=2, chunks=2), "chunks=2 mixes the gradients of several parts of a batch; leave chunks out"),
    ],
)
def test_a_plan_that_cannot_cut_the_trees_is_refused(call: CallPlan, said: str, tmp_path: Path) -> None:
    runs = Runs(tmp_path, "--reproducible", "layout", one=ONE)
    with pytest.raises(UserError, match=said):
        runs.run(tmp_path, "sft", Pattern((call,), (call,), (call,)))
