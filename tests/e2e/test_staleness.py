"""Rollouts by weights k updates old: which weights they are, whatever the plan and however steps overlap."""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from realhf.dataflow.plan import CallPlan, ExecutionPlan, OrderEntry, save_plan
from realhf.engine.backend import ModelSpec
from realhf.engine.model import ShardedModel
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.lifecycle.request import experiment_of
from realhf.parallel.groups import ParallelGroups
from realhf.planning.planner import search_for, task_of
from realhf.planning.request import Measured, PlanRequest, SearchBudget
from realhf.rundir.run import load_experiment_class
from tests.e2e.forked import quickly_finished
from tests.e2e.runs import ACTOR, ROOT, FinishedRun, initial_parameters, realhf
from tests.unit.models.llama import llama, llama_logits
from tests.unit.planning.graphs import cpu_cluster

pytestmark = pytest.mark.distributed

SEED, STEPS = 7, 4
ONE, FIRST, SECOND = CallPlan(devices=(0, 1)), CallPlan(devices=(0, 1)), CallPlan(devices=(1, 1))
CALLS = (
    "actor_generate",
    "reward_inference",
    "reference_inference",
    "critic_inference",
    "actor_train_step",
    "critic_train_step",
)
SEQUENTIAL = ExecutionPlan(num_devices=1, calls=dict.fromkeys(CALLS, ONE), max_steps_in_flight=1)
# Generation has a worker of its own, and may run while the other one trains.
OVERLAPPING = ExecutionPlan(
    num_devices=2, calls={**dict.fromkeys(CALLS, SECOND), "actor_generate": FIRST}, max_steps_in_flight=2
)


def run(plan: ExecutionPlan, folder: Path) -> FinishedRun:
    folder.mkdir()
    save_plan(plan, folder / "plan.json")
    words = f"--staleness 1 --steps {STEPS} --seed {SEED} --batch-size 8 --dtype float64 --no-evaluate"
    keys = ("--checkpoint-every", "1", "--record", "seq", "logprob", "ref_logprob")
    return quickly_finished(folder / "run", "ppo", "--plan", folder / "plan.json", *words.split(), *keys)


def test_rollouts_are_made_by_the_weights_before_the_last_update(tmp_path: Path) -> None:
    sequential, overlapping = run(SEQUENTIAL, tmp_path / "one"), run(OVERLAPPING, tmp_path / "two")
    for made in (sequential, overlapping):
        versions = [line["calls"]["actor_generate"]["weights_version"] for line in made.metrics]
        assert versions == [0, 0, 1, 2]
        assert [line["calls"]["actor_train_step"]["weights_version"] for line in made.metrics] == [0, 1, 2, 3]
        # The copy after a step is the actor before the step's training.
        actors = [initial_parameters(ACTOR, SEED), *(made.parameters_at(s, "actor", ACTOR) for s in range(1, STEPS))]
        for step, actor in enumerate(actors, start=1):
            assert torch.equal(made.parameters_at(step, "rollout", ACTOR), actor)
        assert (actors[2] - actors[1]).norm() > 1e-3, "the actor must have moved"
        # The reference stays as it was at the start, and says the same of two steps' rollouts as who made them.
        assert [is_of_reference(made, step) for step in range(STEPS)] == [True, True, False, False]
    for step in range(STEPS):
        one, other = sequential.recorded(step, "seq"), overlapping.recorded(step, "seq")
        assert one.keys() == other.keys()
        assert all(torch.equal(one[i], other[i]) for i in one)
    difference = sequential.parameters("actor", ACTOR) - overlapping.parameters("actor", ACTOR)
    assert difference.abs().max() < 1e-9


@pytest.mark.slow
def test_a_plan_makes_rollouts_as_stale_as_an_experiment_that_asks_for_it(tmp_path: Path) -> None:
    """The oracle is the experiment's own staleness: the same rollouts and weights, which those of a plan without are
    not. The plan comes from a search that may choose it."""
    words = ["--batch-size", "8", "--no-evaluate", "--ppo.max-new-tokens", "128"]
    experiment = experiment_of("experiments/ppo.py", words)
    unmeasured = Measured(profiles=tmp_path, ignores_runs=True)
    task = task_of(experiment, cpu_cluster(2), PlanRequest(offload=(), measured=unmeasured, staleness_up_to=1))
    plan = search_for(task, SearchBudget(evaluations=4000)).plan
    assert plan.staleness == 1
    save_plan(plan, tmp_path / "plan.json")
    save_plan(msgspec.structs.replace(plan, staleness=0, order=(), models={}), tmp_path / "fresh.json")
    words += f"--steps {STEPS} --seed {SEED} --dtype float64 --record seq".split()
    planned, fresh = (
        quickly_finished(tmp_path / name, "ppo", "--plan", tmp_path / f"{name}.json", *words)
        for name in ("plan", "fresh")
    )
    own = quickly_finished(tmp_path / "own", "ppo", "--plan", tmp_path / "fresh.json", "--staleness", "1", *words)
    versions = [line["calls"]["actor_generate"]["weights_version"] for line in planned.metrics]
    assert versions == [0, 0, 1, 2]
    for step in range(STEPS):
        rollouts = [run.recorded(step, "seq") for run in (planned, own)]
        assert rollouts[0].keys() == rollouts[1].keys()
        assert all(torch.equal(rollouts[0][i], rollouts[1][i]) for i in rollouts[0])
    difference = [planned.parameters("actor", ACTOR) - run.parameters("actor", ACTOR) for run in (own, fresh)]
    assert difference[0].abs().max() < 1e-9
    assert difference[1].norm() > 1e-3
    again = ("--resume", "--plan", tmp_path / "fresh.json", "--steps", str(STEPS + 1))
    refused = realhf("run", "experiments/ppo.py", "--run-dir", tmp_path / "plan", *again)
    assert refused.returncode == 2
    assert "--plan says staleness=0, and the run's rollouts are by weights 1 update" in refused.stderr


def is_of_reference(made: FinishedRun, step: int) -> bool:
    said, of_reference = made.recorded(step, "logprob"), made.recorded(step, "ref_logprob", "reference_inference")
    return all(torch.allclose(said[i], of_reference[i], atol=1e-9) for i in said)


JOB = "../tests/e2e/stale_job"
RECORDED = ("--record", "tokens", "prompt_length", "weights_version")


def running_ahead(staleness: int) -> ExecutionPlan:
    """Worker 0 answers, worker 1 trains. The weights of a step are copied when the answers of k - 1 steps later, which
    do not need them, have been made: so k steps of answers may be ahead of training."""
    late = staleness - 1
    order = (("rollout_generate", 0), ("rollout_follows_actor", late), ("actor_train_step", late))
    return ExecutionPlan(
        num_devices=2,
        calls={"rollout_generate": FIRST, "actor_train_step": SECOND},
        order=tuple(OrderEntry(call=call, steps_back=steps_back) for call, steps_back in order),
        max_steps_in_flight=staleness + 1,
    )


def delayed(prompts: list[list[Tensor]], staleness: int, seed: int) -> Iterator[tuple[list[Tensor], float]]:
    """The oracle, one process of plain torch with Hugging Face's Llama: the answers of every step, by the weights of
    `staleness` steps before, and the loss of the present ones on these answers, on which they are then trained."""
    job = sys.modules[load_experiment_class(ROOT / "tests/e2e/stale_job.py").__module__]
    initial = ShardedModel(
        ModelSpec(job.TINY, ParallelGroups(Layout(DeviceMesh(0, 1), ParallelStrategy()), 0), torch.float64)
    )
    initial.initialise(seed)
    actor, rollout = llama(job.TINY, initial), llama(job.TINY, initial)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=job.LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    versions = []
    for step, of_step in enumerate(prompts):
        versions.append({name: tensor.clone() for name, tensor in actor.state_dict().items()})
        rollout.load_state_dict(versions[max(0, step - staleness)])
        answers = []
        for prompt in of_step:
            tokens = prompt
            for _ in range(job.NEW_TOKENS):
                with torch.no_grad():
                    most_likely = llama_logits(rollout, [tokens])[-1].argmax()
                tokens = torch.cat([tokens, most_likely[None]])
            answers.append(tokens)
        terms = [
            torch.nn.functional.cross_entropy(
                llama_logits(actor, [tokens])[len(prompt) - 1 : -1], tokens[len(prompt) :], reduction="none"
            )
            for prompt, tokens in zip(of_step, answers, strict=True)
        ]
        loss = torch.cat(terms).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
        optimizer.step()
        yield answers, loss.item()


def check(run: FinishedRun, staleness: int, seed: int, steps: int) -> None:
    """Answers, losses and versions are those of the oracle."""
    recorded = [run.recorded(step, "tokens", "rollout_generate") for step in range(steps)]
    lengths = [run.recorded(step, "prompt_length", "rollout_generate") for step in range(steps)]
    prompts = [
        [tokens[i][: int(length[i])] for i in sorted(tokens)] for tokens, length in zip(recorded, lengths, strict=True)
    ]
    losses = []
    for step, (answers, loss) in enumerate(delayed(prompts, staleness, seed)):
        assert all(torch.equal(recorded[step][i], answer) for i, answer in enumerate(answers)), f"step {step}"
        assert abs(run.metrics[step]["loss"] - loss) < 1e-9, f"step {step}"
        version = max(0, step - staleness)
        of_samples = run.recorded(step, "weights_version", "rollout_generate")
        assert [of_samples[i].tolist() for i in sorted(of_samples)] == [[version]] * len(prompts[step])
        calls = run.metrics[step]["calls"]
        assert calls["rollout_generate"]["weights_version"] == version
        assert calls["actor_train_step"]["weights_version"] == step
        losses.append(loss)
    assert losses != [loss for _, loss in delayed(prompts, staleness - 1, seed)], "fresher answers are others"


def test_answers_run_ahead_of_training_by_the_staleness(tmp_path: Path) -> None:
    """Training of a step does not end before answers for that of two steps later are being made."""
    save_plan(running_ahead(2), tmp_path / "plan.json")
    words = f"--staleness 2 --steps 5 --seed {SEED} --meeting {tmp_path}".split()
    check(
        quickly_finished(tmp_path / "run", JOB, "--plan", tmp_path / "plan.json", *words, *RECORDED), 2, SEED, steps=5
    )


@pytest.mark.slow
def test_three_steps_old_across_borders_and_a_resumption(tmp_path: Path) -> None:
    """At a border every second step no step is in flight, and what later steps will need is in the checkpoint. The run
    goes on in other layouts, with a copy that waits in host memory between its answers."""
    save_plan(running_ahead(3), tmp_path / "plan.json")
    words = f"--staleness 3 --steps 4 --seed {SEED} --checkpoint-every 2".split()
    quickly_finished(tmp_path / "run", JOB, "--plan", tmp_path / "plan.json", *words, *RECORDED)
    together = CallPlan(devices=(0, 2), tp=2), CallPlan(devices=(0, 2), dp=2)
    calls = dict(zip(("rollout_generate", "actor_train_step"), together, strict=True))
    other = ExecutionPlan(num_devices=2, calls=calls, offload=("rollout",), max_steps_in_flight=4)
    save_plan(other, tmp_path / "other.json")
    words = ["--resume", "--steps", "8", "--plan", tmp_path / "other.json"]
    check(quickly_finished(tmp_path / "run", JOB, *words), 3, SEED, steps=8)
