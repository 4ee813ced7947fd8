"""Every plan computes what one worker computes: the main job, small, under many layouts against a single process."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from realhf.algorithms.ppo.config import PPOHyperparameters
from realhf.architecture.model import DecoderConfig
from realhf.dataflow.plan import load_plan
from realhf.engine.generate.sampling import draw, uniform
from realhf.geometry.shards import units
from realhf.report.run_data import read_trace
from realhf.rundir.run import load_experiment_class
from tests.e2e.forked import quickly_finished
from tests.e2e.runs import ROOT, SMALL, SMALL_ACTOR, SMALL_CRITIC, FinishedRun, finished, initial_parameters, realhf

# On two workers: the actor trains in an interleaved pipeline and generates in groups of its home, the critic and the
# reward model are fully sharded, and the reference is interleaved. In `computed` the plan says how each model computes.
MINIATURE = "miniature"
SHARDED = ("--compute.data-parallel", "fsdp")
PLANS = [MINIATURE, "computed", "generate_dp4_train_tp2_pp2", "mixed_disjoint"]
SLOW_PLANS = ["dp4", "tp4", "pp4", "generate_on_two_critic_on_two", "interleaved", "grouped", "in_place"]
ALL_PLANS = [*PLANS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_PLANS)]
# In float32 a plan says little that it does not say in float64.
FLOAT32_PLANS = [
    "mixed_disjoint",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("generate_dp4_train_tp2_pp2", "interleaved")),
]
SEED, STEPS = 7, 2
# Of float32 logits, by how much two plans may differ. A logit of about 1 is the end of some thirty products that follow
# one another (7 in each of 4 layers, embedding and head), each a sum of up to 512 numbers. Every sum rounds by 2**-24 a
# number in whatever direction its order has: 2**-24 x sqrt(30 x 512) is 7e-6. Twice that, and a power of two.
MOST_ROUNDING = 2.0**-16
# Of a thousand tokens. Both plans draw with the same random numbers, and a token flips where one of the 31 borders
# between tokens crosses its number. A border moves by half of the rounding at most: 31 x 2**-17 is one token of 4,200.
MOST_FLIPS = 1
# The actor's loss is a mean of terms of about 1, the normalised advantages, which cancel to some 1e-4: of its rounding
# the terms' size tells, 2**-24 each and a few of them one behind the other, and not what is left of them.
CANCELLED = {"actor_loss": 5e-7}
COMMON = f"--steps {STEPS} --seed {SEED} --no-evaluate --record seq logits".split()
IN_FLOAT64 = ("--dtype", "float64", *SMALL)
IN_FLOAT32 = ("--batch-size", "64")


def run_plan(folder: Path, plan: str, *words: str | Path) -> FinishedRun:
    return quickly_finished(folder, "ppo", "--plan", f"tests/plans/{plan}.json", *COMMON, *words)


@pytest.fixture(scope="module")
def reference64(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return run_plan(tmp_path_factory.mktemp("reference") / "float64", "single", *IN_FLOAT64)


@pytest.fixture(scope="module")
def reference32(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return run_plan(tmp_path_factory.mktemp("reference") / "float32", "single", *IN_FLOAT32)


@pytest.mark.distributed
@pytest.mark.parametrize("plan", ALL_PLANS)
def test_float64_rollouts_are_identical_and_parameters_agree(
    plan: str, reference64: FinishedRun, tmp_path: Path
) -> None:
    words = SHARDED if plan == MINIATURE else ()
    check_float64(run_plan(tmp_path / "run", plan, *IN_FLOAT64, *words), reference64)


@pytest.fixture(scope="module")
def modes64(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """On two workers the operators of actor, critic and reward model have all modes, some in slices."""
    return run_plan(tmp_path_factory.mktemp("modes") / "run", "modes", *IN_FLOAT64)


@pytest.mark.distributed
def test_operators_in_all_modes_compute_the_same(modes64: FinishedRun, reference64: FinishedRun) -> None:
    check_float64(modes64, reference64)


@pytest.mark.distributed
def test_bytes_of_all_modes_are_those_of_the_paper(modes64: FinishedRun) -> None:
    """OSDP, IJCAI 2023: an all-reduce is two passes of what a rank sends, a sharded operator has three for each
    micro-batch, and one more with recomputation. Less by what is still there when it is needed again."""
    plan = load_plan(ROOT / "tests/plans/modes.json")
    calls = modes64.metrics[0]["calls"]

    optimizer_steps = {
        call.name: call.optimizer_steps for call in load_experiment_class(ROOT / "experiments/ppo.py")().rpcs
    }

    def bytes_of(call: str, config: DecoderConfig, *names: str) -> dict[str, int]:
        planned = plan.calls[call]
        found = dict.fromkeys(("always", "sharded", *names), 0)
        for unit in units(config, planned.layout, 0, planned.compute.data_parallel):
            sent = optimizer_steps[call] * unit.flat.size * 8 // 2  # of float64, by each of two ranks
            found["sharded" if unit.mode == "sharded" else "always"] += sent
            for name in names:
                found[name] += sent if re.fullmatch(name, unit.name) else 0
        return found

    # Actor: two micro-batches. The head's backward pass begins when its forward pass has ended, that of the embedding
    # reads no value, and of two micro-batches the second begins where at most two units of the first are left.
    sent, of = calls["actor_train_step"]["sent_bytes"], bytes_of("actor_train_step", SMALL_ACTOR, "head", "embedding")
    left = bytes_of("actor_train_step", SMALL_ACTOR, r"layers\.0\.[kv]")[r"layers\.0\.[kv]"]
    assert sent["reduce_scatter"] == of["always"] + 2 * of["sharded"]
    gathered = of["always"] + 2 * (2 * of["sharded"] - of["head"] - of["embedding"])
    assert gathered - left <= sent["all_gather"] <= gathered
    # Critic: one micro-batch, its layers recomputed.
    sent = calls["critic_train_step"]["sent_bytes"]
    of = bytes_of("critic_train_step", SMALL_CRITIC, "head", r"embedding:\d")
    assert sent["reduce_scatter"] == of["always"] + of["sharded"]
    once = of["head"] + of[r"embedding:\d"]
    assert sent["all_gather"] == of["always"] + once + 3 * (of["sharded"] - once)


@pytest.mark.distributed
def test_a_search_recomputes_where_memory_is_short_and_the_run_computes_the_same(
    reference64: FinishedRun, tmp_path: Path
) -> None:
    """With 22 MiB a worker, of which 16 are those of libraries, the activations of a training do not fit. Those of some
    of the four layers do."""
    tight = ("--num-workers", "2", "--hardware", "cpu", "--memory-gb", "0.0212", "--evaluations", "5000")
    run = quickly_finished(tmp_path / "run", "ppo", *tight, *COMMON, *IN_FLOAT64)
    calls = json.loads((tmp_path / "run/plan.json").read_text())["calls"]
    chosen = {name: call["compute"].get("recomputation") for name, call in calls.items()}
    assert {name for name, kind in chosen.items() if kind} == {"actor_train_step", "critic_train_step"}
    numbers = [call["compute"].get("recomputed_layers") for call in calls.values() if call["compute"]]
    assert numbers
    assert all(number in (1, 2, 3) for number in numbers)
    worth = json.loads((tmp_path / "run/plan.json").read_text())["rationale"]["worth"]
    assert {one["of"] for one in worth} == {"actor_train_step", "critic_train_step"}
    check_float64(run, reference64)


@pytest.mark.distributed
@pytest.mark.slow
def test_a_search_shards_operators_where_memory_is_short_and_the_run_computes_the_same(tmp_path: Path) -> None:
    """The critic has one layer and one head, which data parallelism alone divides: as ZeRO-1 it does not fit."""
    quickly_finished(tmp_path / "sft", "sft", "--num-workers", "1", "--steps", "1", "--no-evaluate", *SMALL[2:])
    shape = {"num-layers": 1, "num-heads": 1, "num-kv-heads": 1, "hidden-size": 512, "intermediate-size": 1536}
    sizes = [word for name, size in shape.items() for word in (f"--architecture.{name}", str(size))]
    job: tuple[str, ...] = (
        "--model",
        str(tmp_path / "sft"),
        "--batch-size",
        "8",
        *sizes,
        "--no-evaluate",
        "--seed",
        "7",
    )
    job = (*job, "--evaluations", "5000")
    # Checkpoints are written from copies, which need memory, too.
    tight = ("--num-workers", "2", "--hardware", "cpu", "--memory-gb", "0.084", "--checkpoint-every", "2")
    run = quickly_finished(tmp_path / "run", "ppo", *job, *tight, "--steps", "4")
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    chosen = plan["calls"]["critic_train_step"]["compute"]["data_parallel"]
    assert isinstance(chosen, list)
    assert any("sharded" in modes for _, modes in chosen)
    [worth] = [one for one in plan["rationale"]["worth"] if one["of"] == "critic_train_step"]
    assert worth["without_s"] is None, "nothing fits without"
    whole = quickly_finished(tmp_path / "whole", "ppo", *job, "--num-workers", "1", "--steps", "4")
    for name in ("critic_loss", "critic_grad_norm", "actor_loss"):
        found, expected = ([line[name] for line in each.metrics] for each in (run, whole))
        assert found == pytest.approx(expected, rel=2e-3, abs=1e-5), name

    quickly_finished(tmp_path / "half", "ppo", *job, *tight, "--steps", "2")
    resumed = quickly_finished(tmp_path / "half", "ppo", "--resume", "--steps", "4")
    assert json.loads((tmp_path / "half/plan.json").read_text())["calls"] == plan["calls"]
    measured = {"calls", "time_s", "tokens_per_s", "peak_bytes", "of_steps"}
    of_both = [[{k: v for k, v in line.items() if k not in measured} for line in r.metrics] for r in (resumed, run)]
    assert of_both[0] == of_both[1], "bit for bit"


@pytest.mark.distributed
@pytest.mark.parametrize(
    "plan", ["single", *(pytest.param(p, marks=pytest.mark.slow) for p in ("mixed_disjoint", "sharded"))]
)
def test_offloaded_models_compute_the_same(plan: str, reference64: FinishedRun, tmp_path: Path) -> None:
    """All models wait in host memory while nothing needs them; on one worker, every bit is that of a run without."""
    written = json.loads((ROOT / f"tests/plans/{plan.replace('sharded', 'dp4')}.json").read_text())
    written["offload"] = ["actor", "reference", "reward", "critic"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(written))
    words = SHARDED if plan == "sharded" else ()
    run = finished(tmp_path / "run", "ppo", "--plan", path, *COMMON, *IN_FLOAT64, *words)
    check_float64(run, reference64)
    if plan == "single":
        for model, config in (("actor", SMALL_ACTOR), ("critic", SMALL_CRITIC)):
            assert torch.equal(run.parameters(model, config), reference64.parameters(model, config))
    phases = [event.get("cat") for event in json.loads((run.path / "trace.json").read_text())]
    assert phases.count("offload") >= 2 * STEPS * 6, "before and behind each call"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("generation", ["at home", "elsewhere"])
def test_fully_sharded_homes_compute_the_same(generation: str, reference64: FinishedRun, tmp_path: Path) -> None:
    """Training and inference gather from shards; generation gathers all, or gets a copy made of the shards."""
    plan = json.loads((ROOT / "tests/plans/dp4.json").read_text())
    for call in ("actor_train_step", "critic_inference"):
        plan["calls"][call] |= {"dp": 2, "tp": 2}
    if generation == "at home":
        plan["calls"]["actor_generate"] |= {"dp": 2, "tp": 2}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    run = finished(tmp_path / "run", "ppo", "--plan", path, *COMMON, *IN_FLOAT64, *SHARDED)
    check_float64(run, reference64)


def check_float64(run: FinishedRun, reference64: FinishedRun) -> None:
    for step in range(STEPS):
        expected, got = reference64.recorded(step, "seq"), run.recorded(step, "seq")
        assert expected.keys() == got.keys()
        differing = [i for i in expected if not torch.equal(expected[i], got[i])]
        assert not differing, f"step {step}: samples {differing} differ"
    for model, config in (("actor", SMALL_ACTOR), ("critic", SMALL_CRITIC)):
        start = initial_parameters(config, SEED)
        expected_update = reference64.parameters(model, config) - start
        update = run.parameters(model, config) - start
        assert expected_update.norm() > 1e-3, "the steps must have changed something"
        assert (update - expected_update).norm() < 1e-7 * expected_update.norm()


@pytest.mark.distributed
@pytest.mark.parametrize("plan", FLOAT32_PLANS)
def test_float32_losses_agree_on_the_same_tokens(plan: str, reference32: FinishedRun, tmp_path: Path) -> None:
    run = run_plan(tmp_path / "run", plan, *IN_FLOAT32, "--replay", reference32.path / "rollouts")
    for expected, got in zip(reference32.metrics, run.metrics, strict=True):
        for name in ("actor_loss", "critic_loss", "reward_mean", "return_mean", "actor_grad_norm", "critic_grad_norm"):
            assert got[name] == pytest.approx(expected[name], rel=1e-4, abs=CANCELLED.get(name, 0.0)), name
    flips = 0
    for step in range(STEPS):
        expected, got = reference32.recorded(step, "logits"), run.recorded(step, "logits")
        sequences = reference32.recorded(step, "seq")
        for sample, logits in expected.items():
            flips += check_draws(sample, step, sequences[sample], logits, got[sample])
    tokens = sum(line["tokens"] for line in run.metrics)
    assert flips <= MOST_FLIPS * tokens / 1000, f"{flips} of {tokens} tokens would be drawn differently"


def check_draws(sample: int, step: int, sequence: Tensor, expected: Tensor, got: Tensor) -> int:
    """Draws a sample's tokens from both runs' logits [response, vocab], of the same prefixes; returns
    how many differ. The logits differ by no more than rounding, and a token only where that can move it.

    If every logit moves by at most d, a probability moves by a factor of at most exp(2 d), hence a
    border of the cumulative distribution by at most exp(2 d) - 1.
    """
    response = len(expected)
    first = len(sequence) - response
    places = torch.arange(first, len(sequence))
    uniforms = uniform(SEED, step, torch.full((response,), sample), places)
    temperature = PPOHyperparameters().temperature
    reference, other = draw(expected, uniforms, temperature), draw(got, uniforms, temperature)
    assert torch.equal(reference.tokens, sequence[first:]), "the recorded logits explain the recorded tokens"
    difference = (expected - got).abs().max().item()
    assert difference <= MOST_ROUNDING, f"sample {sample}: a logit differs by {difference:.1e}, more than rounding"
    differs = reference.tokens != other.tokens
    moved = math.expm1(2 * MOST_ROUNDING / temperature)
    assert (reference.margins[differs] <= moved).all(), f"sample {sample}: a token flipped against its margin"
    return int(differs.sum())


def test_logits_that_differ_by_more_than_rounding_are_found() -> None:
    logits, step, sample = torch.randn(12, 32), 0, 5
    uniforms = uniform(SEED, step, torch.full((12,), sample), torch.arange(3, 15))
    drawn = draw(logits, uniforms, PPOHyperparameters().temperature).tokens
    sequence = torch.cat([torch.zeros(3, dtype=drawn.dtype), drawn])
    assert check_draws(sample, step, sequence, logits, logits + 1e-6 * torch.rand(12, 32)) <= 1
    one_is_wrong = logits.clone()
    one_is_wrong[7, 3] += 1e-4
    for wrong in (torch.randn(12, 32), one_is_wrong, torch.full_like(logits, torch.nan)):
        with pytest.raises(AssertionError, match="more than rounding"):
            check_draws(sample, step, sequence, logits, wrong)


def test_heads_that_four_workers_cannot_split_are_refused(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ("--architecture.num-heads", "6", "--architecture.num-kv-heads", "6", "--run-dir", str(run_dir))
    refused = realhf("run", "experiments/ppo.py", "--plan", "tests/plans/tp4.json", *words)
    assert refused.returncode == 2
    assert "tp=4 does not divide --architecture.num-heads=6; choose tp from 1, 2" in refused.stderr
    assert not run_dir.exists(), "nothing is left behind"


def test_every_plan_of_the_folder_is_run_or_the_reference() -> None:
    assert {path.stem for path in (ROOT / "tests/plans").glob("*.json")} == {*PLANS, *SLOW_PLANS, "modes", "single"}


@pytest.mark.slow
@pytest.mark.distributed
def test_twenty_steps_with_every_reallocation_verified(tmp_path: Path) -> None:
    """A mismatch would end the run; one is made in `tests/distributed/test_realloc.py`."""
    words = ("--steps", "20", "--no-evaluate", "--verify-reallocations-every", "1")
    run = finished(tmp_path / "run", "ppo", "--plan", "tests/plans/mixed_disjoint.json", *words)
    spans = [event for event in read_trace(run.path / "trace.json", tail_bytes=2**24) if event.cat == "reallocation"]
    devices = {span.tid for span in spans}
    assert len(run.metrics) == 20
    assert len(spans) >= 20 * len(devices) > 20
