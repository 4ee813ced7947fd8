"""Live programs: the ready scripts give what they give when they are traced; and programs that no trace could have."""

import contextlib
import dataclasses
import inspect
import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from realhf import cli
from realhf.algorithms.grpo.config import GRPO, group_advantages, grpo_loss
from realhf.algorithms.sft.config import sft_loss
from realhf.api import Examples, Policy, Reward, RewardModel, RunError, Teacher, UserError, ValueModel, tensor_function
from realhf.api.script.data import ScriptData
from realhf.api.script.models import ScriptModel
from realhf.data import sort_task
from realhf.dataflow.plan import save_plan
from realhf.experiments import ready_file
from realhf.lifecycle.request import experiment_of
from realhf.live import cluster as live
from realhf.rundir.status import EndRequest, request_end
from tests.e2e.forked import ForkedLauncher, quickly_finished
from tests.e2e.runs import ROOT, SMALL, SMALL_ACTOR, FinishedRun
from tests.e2e.test_algorithms_plans import JOBS, MEASURED, REWARDS, Job, Pattern, Runs, at
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.distributed

STEPS = 3


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LocalLauncher", ForkedLauncher)
    monkeypatch.chdir(ROOT)


def words_of(job: Job, folder: Path, runs: Runs | None = None) -> tuple[str, ...]:
    """`runs`: makes the checkpoints that the job reads."""
    data = sort_task.ensure(folder / "data")
    own = (*SMALL, "--steps", str(STEPS), "--data", data / job.data, "--tokenizer", data / "tokenizer.json")
    rates = [word for model in job.models for word in (f"--{model}.schedule", "constant", f"--{model}.lr", "2e-3")]
    files = {"{examples}": str(data / "sft.jsonl")}
    for word, name in (("{judge}", "reward"), ("{teacher}", "sft")):
        if word in job.words:
            assert runs is not None
            files[word] = str(runs.reference(name).path)
    given = [files.get(word, word) for word in job.words]
    return tuple(map(str, (*own, "--dtype", "float64", *rates, *given)))


def run_live(job: Job, words: tuple[str, ...], run_dir: Path, **settings: Any) -> FinishedRun:
    """The script of a ready experiment, as a program calls it."""
    source = experiment_of(str(ready_file(job.experiment)), words).source
    common = {name: getattr(source, name) for name in ("seed", "dtype", "mini_batches", "architecture", "tokenizer")}
    with live.start(run_dir=run_dir, **common, **settings) as cluster:
        arguments, data = {}, {}
        for name in inspect.signature(type(source).SCRIPT).parameters:
            given = getattr(source, name)
            fields = {one.name: getattr(given, one.name) for one in dataclasses.fields(given)}
            match given:
                case ScriptData():
                    path = fields.pop("data")
                    data[name] = cluster.data(
                        path, batch_size=source.batch_size, steps=STEPS, kind=type(given), **fields
                    )
                case ScriptModel():
                    declare = {
                        Policy: cluster.policy,
                        Teacher: cluster.policy,
                        ValueModel: cluster.value_model,
                        RewardModel: cluster.reward_model,
                    }
                    fields["trained"] = name in job.models
                    arguments[name] = declare[type(given)](fields.pop("model"), name=name, **fields)
                case Reward():
                    arguments[name] = cluster.reward(*fields.pop("functions"), name=name, **fields)
                case _:
                    arguments[name] = given
        for batches in zip(*data.values(), strict=True):
            type(source).SCRIPT(**dict(zip(data, batches, strict=True)), **arguments)
    return FinishedRun(run_dir)


def statistics(run: FinishedRun) -> list[dict[str, float]]:
    left_out = (*MEASURED, "of_steps")
    return [{k: v for k, v in line.items() if k not in left_out and not k.endswith("_seconds")} for line in run.metrics]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("algorithms"))


CASES = [
    pytest.param(name, workers, marks=[] if (name, workers) in (("grpo", 2), ("safe-rlhf", 1)) else pytest.mark.slow)
    for name in JOBS
    for workers in (1, 2, 4)
]


@pytest.mark.parametrize(("name", "workers"), CASES)
def test_a_ready_script_gives_the_same_numbers(name: str, workers: int, runs: Runs, tmp_path: Path) -> None:
    job = JOBS[name]
    words = words_of(job, tmp_path, runs)
    traced = quickly_finished(tmp_path / "traced", ready_file(job.experiment), *words, "--num-workers", str(workers))
    found = run_live(job, words, tmp_path / "live", num_workers=workers)
    expected, got = statistics(traced), statistics(found)
    assert len(expected) == len(got) == STEPS
    for one, other in zip(expected, got, strict=True):
        assert other == pytest.approx(one, rel=1e-12, abs=1e-12)


@pytest.mark.slow
def test_calls_move_parameters_between_layouts_as_a_traced_run_does(tmp_path: Path) -> None:
    """One plan for both, on four workers; the live one reads rows that other workers have made."""
    job = JOBS["grpo"]
    words = words_of(job, tmp_path)
    graph = experiment_of(str(ready_file(job.experiment)), words).graph
    mixed = Pattern(train=(at(0, dp=2, tp=2),), generate=(at(0, dp=4),), infer=(at(2, pp=2), at(0, tp=2), at(1)))
    save_plan(mixed.plan(graph), tmp_path / "plan.json")
    plan = ("--plan", tmp_path / "plan.json")
    traced = quickly_finished(tmp_path / "traced", ready_file(job.experiment), *words, *plan)
    found = run_live(job, words, tmp_path / "live", plan=tmp_path / "plan.json")
    for one, other in zip(statistics(traced), statistics(found), strict=True):
        assert other == pytest.approx(one, rel=1e-12, abs=1e-12)
    digests = [
        [[call.get("new_weights") for name, call in line["calls"].items() if "train" in name] for line in run.metrics]
        for run in (traced, found)
    ]
    assert digests[0] == digests[1]
    assert all(digest for line in digests[0] for digest in line)


# Programs.

OPTIONS = GRPO(max_new_tokens=6, samples_per_prompt=4)
BETWEEN = dataclasses.replace(OPTIONS, beta=0.0)  # without a reference


def letters(text: str) -> float:
    return len(set(text)) / max(1, len(text))


@contextlib.contextmanager
def started(folder: Path, **settings: Any) -> Iterator[live.Cluster]:
    data = sort_task.ensure(folder / "data")
    given = {"num_workers": 2, "run_dir": folder / "run", "tokenizer": str(data / "tokenizer.json"), "dtype": "float64"}
    with live.start(architecture=SMALL_ACTOR, **given | settings) as cluster:
        yield cluster


def prompts_of(cluster: live.Cluster, folder: Path, steps: int) -> live.Batches:
    return cluster.data(str(folder / "data/prompts.jsonl"), batch_size=16, steps=steps)


def test_what_is_called_next_depends_on_what_was_found(tmp_path: Path) -> None:
    """A curriculum (the temperature changes), batches that are left out, the best of several rollouts, and an
    evaluation behind the update of its round."""
    seen: list[tuple[float, bool]] = []
    with started(tmp_path) as cluster:
        actor, reference = cluster.policy(lr=1e-3), cluster.policy(trained=False)
        temperature = 1.0
        for round_, prompts in enumerate(prompts_of(cluster, tmp_path, 4)):
            options = dataclasses.replace(OPTIONS, temperature=temperature)
            tries = [actor.generate(prompts, options) for _ in range(2)]
            texts = [rollout.texts() for rollout in tries]
            assert texts[0] != texts[1], "each generate of a round draws other numbers"
            scores = [[letters(text) for text in of_try] for of_try in texts]
            best = max(range(2), key=lambda i: sum(scores[i]))
            is_left_out = round_ == 1
            seen.append((max(map(sum, scores)) / 16, is_left_out))
            if is_left_out:
                temperature = 0.5
                continue
            rollout, before = tries[best], actor.logprobs(tries[best], key="before")
            batch = group_advantages(rollout, scores[best], reference.logprobs(rollout), OPTIONS)
            report = actor.update(batch, grpo_loss(OPTIONS))
            assert report["reward_mean"] == pytest.approx(sum(scores[best]) / 16, rel=1e-6)
            after = actor.logprobs(rollout, key="after")
            changed = np.abs(np.concatenate(after.after.numpy()) - np.concatenate(before.before.numpy())).max()
            assert 0 < changed < 1, "what comes behind an update has the new weights"
            assert np.array_equal(before.before.numpy()[0], before["before"][0])
    run = FinishedRun(tmp_path / "run")
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4]
    assert [len([1 for call in line["calls"] if "train_step" in call]) for line in run.metrics] == [1, 0, 1, 1]
    assert {"actor_generate", "actor_generate_2"} <= run.metrics[0]["calls"].keys()
    assert "actor_generate~2" in run.metrics[2]["calls"], "other options make another call"
    trained = [(line["calls"], name) for line in run.metrics for name in line["calls"] if "train_step" in name]
    versions = [calls[name]["weights_version"] for calls, name in trained]
    assert versions == [0, 1, 2], "versions are updates, not rounds"


def test_two_policies_play_each_other_until_one_has_won(tmp_path: Path) -> None:
    with started(tmp_path) as cluster:
        players = [cluster.policy(lr=1e-3, name="first"), cluster.policy(lr=1e-3, name="second")]
        for rounds, prompts in enumerate(prompts_of(cluster, tmp_path, 50), 1):
            rollouts = [player.generate(prompts, OPTIONS) for player in players]
            points = [np.array([letters(text) for text in rollout.texts()]) for rollout in rollouts]
            for player, rollout, own, other in zip(players, rollouts, points, reversed(points), strict=True):
                batch = group_advantages(rollout, np.sign(own - other), None, BETWEEN)
                player.update(batch, grpo_loss(BETWEEN))
            if rounds == 3:
                break
    assert len(FinishedRun(tmp_path / "run").metrics) == 3
    assert {path.name for path in (tmp_path / "run/checkpoints/latest/").iterdir()} >= {"first", "second"}


def test_a_model_is_saved_for_transformers(tmp_path: Path) -> None:
    with started(tmp_path, dtype="float32") as cluster:
        actor = cluster.policy(lr=1e-2)
        for prompts in prompts_of(cluster, tmp_path, 1):
            rollout = actor.generate(prompts, OPTIONS)
            actor.save(str(tmp_path / "before"))
            for number in range(2):
                scores = [letters(text) for text in rollout.texts()]
                actor.update(group_advantages(rollout, scores, None, BETWEEN), grpo_loss(BETWEEN))
                actor.save(str(tmp_path / f"after-{number}"))
            with pytest.raises(UserError, match="exists already"):
                actor.save(str(tmp_path / "before"))
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("before", "after-0", "after-1")]
    assert len({*files}) == 3


def test_the_truth_of_values_that_are_asked_for(tmp_path: Path) -> None:
    """Columns of rows, of calls and of tensor functions."""
    with started(tmp_path, num_workers=1) as cluster:
        actor, reward = cluster.policy(), cluster.reward(f"{REWARDS}:copied")
        for prompts in prompts_of(cluster, tmp_path, 2):
            rollout = actor.generate(prompts, OPTIONS)
            scores = reward.score(rollout)
            texts = prompts.texts()
            assert [len({*texts[i : i + 4]}) for i in (0, 4, 8, 12)] == [1] * 4, "four responses share a row"
            assert len({*texts}) == 4
            assert len(rollout) == len(rollout.texts()) == 16
            assert scores.reward.mean() == pytest.approx(scores.reward.numpy().mean(), rel=1e-6)
            assert scores.reward.min() <= scores.reward.mean() <= scores.reward.max()
            batch = group_advantages(rollout, scores, None, BETWEEN)
            advantages = np.array([values[0] for values in batch.advantage.values()]).reshape(4, 4)
            assert np.abs(advantages.sum(1)).max() < 1e-4
            assert [len(a) for a in rollout.logprob.values()] == [len(a) for a in batch.advantage.values()]
            actor.update(batch, grpo_loss(BETWEEN))


def test_columns_of_the_file_stand_beside_what_was_drawn(tmp_path: Path) -> None:
    rows = [{"prompt": letter * (1 + number), "answer": number} for number, letter in enumerate("abcdefgh")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with started(tmp_path, num_workers=1) as cluster:
        actor = cluster.policy(trained=False)
        for prompts in cluster.data(str(tmp_path / "rows.jsonl"), batch_size=16):
            rollout = actor.generate(prompts, OPTIONS)
            answers = rollout["answer"]
            assert answers == [answer for answer in answers[::4] for _ in range(4)]
            assert [len(text) - 1 for text in prompts.texts()] == answers, "prompts and answers are of one row"
            sequences = rollout.seq.values()
            lengths = [len(each) for each in rollout.prompt.values()]
            assert len({length - answer for length, answer in zip(lengths, answers, strict=True)}) == 1
            assert all(len(seq) > length for seq, length in zip(sequences, lengths, strict=True))
    assert len(FinishedRun(tmp_path / "run").metrics) == 2, "each row once"


def scaled(rollout: Any, limits: tuple[float, float]) -> dict[str, Any]:
    low, high = limits
    return {"advantage": [logprob.clamp(low, high) for logprob in rollout.logprob]}


def test_a_tuple_is_no_column(tmp_path: Path) -> None:
    with started(tmp_path, num_workers=1) as cluster:
        actor = cluster.policy(trained=False)
        for prompts in prompts_of(cluster, tmp_path, 1):
            with pytest.raises(UserError, match="save comes before any call"):
                actor.save(str(tmp_path / "out"))
            rollout = actor.generate(prompts, OPTIONS)
            found = tensor_function(scaled)(rollout, (-3.0, -2.5))
            assert -3.0 <= found.advantage.min() <= found.advantage.max() <= -2.5


def test_examples_are_learnt_each_once(tmp_path: Path) -> None:
    rows = [{"prompt": letter, "response": letter.upper()} for letter in "abcdefgh"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row).lower() + "\n" for row in rows))
    with started(tmp_path, num_workers=1) as cluster:
        actor, losses = cluster.policy(lr=1e-2), list[float]()
        for examples in cluster.data(str(tmp_path / "rows.jsonl"), batch_size=4, kind=Examples):
            assert all(text[0] == text[-1] for text in examples.texts()), "prompt and response"
            losses.append(actor.update(examples, sft_loss())["actor_loss"])
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))


def failing(rollout: Any, scores: Any) -> dict[str, Any]:
    raise ZeroDivisionError("a mistake of the program")


def with_a_mistake(folder: Path) -> None:
    with started(folder) as cluster:
        actor = cluster.policy()
        for number, prompts in enumerate(prompts_of(cluster, folder, 3)):
            rollout = actor.generate(prompts, OPTIONS)
            scores = [letters(text) for text in rollout.texts()]
            function = tensor_function(failing) if number else group_advantages
            more = () if number else (None, BETWEEN)
            actor.update(function(rollout, scores, *more), grpo_loss(BETWEEN))["actor_loss"]


def test_a_mistake_on_a_worker_names_the_line_of_the_program(tmp_path: Path) -> None:
    said = r"test_live.py:\d+: worker \d failed in actor_train_step~2 of step 2(.|\n)*a mistake of the program"
    with pytest.raises(RunError, match=said):
        with_a_mistake(tmp_path)
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "failed"
    assert not multiprocessing.active_children()


def interrupted(folder: Path) -> None:
    with started(folder) as cluster:
        actor = cluster.policy()
        for prompts in prompts_of(cluster, folder, 3):
            actor.generate(prompts, OPTIONS).texts()
            assert len(multiprocessing.active_children()) == 2
            raise KeyboardInterrupt


def test_a_program_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path)
    assert not multiprocessing.active_children()
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "interrupted"


def killed(folder: Path) -> None:
    with started(folder) as cluster:
        actor = cluster.policy()
        for number, prompts in enumerate(prompts_of(cluster, folder, 3)):
            if number == 1:
                os.kill(multiprocessing.active_children()[-1].pid or 0, signal.SIGKILL)
            actor.generate(prompts, OPTIONS).texts()


def test_a_worker_that_is_killed_ends_the_program(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"worker-\d was killed by signal 9"):
        killed(tmp_path)
    assert not multiprocessing.active_children()


def test_what_a_program_cannot_have(tmp_path: Path) -> None:
    with started(tmp_path, num_workers=1) as cluster:
        actor = cluster.policy()
        with pytest.raises(UserError, match="knows no sed; choose from num_workers, run_dir, plan, seed, dtype"):
            live.start(sed=1)  # type: ignore[call-arg]
        with pytest.raises(UserError, match="there is no batch"):
            actor.generate(None, OPTIONS)
        with pytest.raises(UserError, match=r"actor_2: schedule='linear'"):
            cluster.policy(schedule="linear", name="actor_2")
        before = None
        for prompts in prompts_of(cluster, tmp_path, 2):
            with pytest.raises(UserError, match="how many responses share a row is not known"):
                prompts.texts()
            rollout = actor.generate(prompts, OPTIONS)
            with pytest.raises(UserError, match="declare it before"):
                cluster.policy()
            with pytest.raises(UserError, match="15 numbers of shape"):
                group_advantages(rollout, [1.0] * 15, None, BETWEEN)
            with pytest.raises(UserError, match="is not one value"):
                bool(rollout.logprob)
            with pytest.raises(UserError, match="top level of a file"):
                actor.update(tensor_function(lambda rollout: {})(rollout), grpo_loss(BETWEEN))["actor_loss"]
            if before is not None:
                with pytest.raises(UserError, match="is of batch 1, and the program is at batch 2"):
                    actor.logprobs(before)
                with pytest.raises(UserError, match="is of batch 1"):
                    before.texts()
            before = rollout
            break


def test_a_program_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the run is over: ended after step 2, as was asked"):
        stopped(tmp_path)
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["step"]) == ("stopped", 2)
    assert (tmp_path / "run/checkpoints/latest/actor").is_dir()
    assert not multiprocessing.active_children()


def stopped(folder: Path) -> None:
    with started(folder) as cluster:
        actor = cluster.policy(lr=1e-3)
        for number, prompts in enumerate(prompts_of(cluster, folder, 100)):
            rollout = actor.generate(prompts, OPTIONS)
            actor.update(group_advantages(rollout, [1.0, 0.0] * 8, None, BETWEEN), grpo_loss(BETWEEN))["actor_loss"]
            if number == 1:
                request_end(folder / "run/launcher/stop", EndRequest(reason="asked"))
                time.sleep(3)  # the master looks every second


class DiesError(Exception):
    """The program ends."""


def learning(folder: Path, run_dir: str, *, dies: tuple[int, str] = (-1, ""), noise: int = 0, **settings: Any) -> None:
    """Some rounds, of other lengths and calls each; `dies` at a place of a round."""

    def at(place: str) -> None:
        if dies == (number, place):
            raise DiesError

    given = {"run_dir": folder / run_dir, "checkpoint_every": 2} | settings
    with started(folder, **given) as cluster:
        actor, reference = cluster.policy(lr=1e-2), cluster.policy(trained=False)
        options, kl = OPTIONS, 0.0
        for number, prompts in enumerate(prompts_of(cluster, folder, 7)):
            rollout = actor.generate(prompts, options)
            at("begun")
            scores = [letters(text) for text in rollout.texts()]
            at("fetched")
            if number == 2:
                continue
            for _ in range(1 + number % 2):
                batch = group_advantages(rollout, scores, reference.logprobs(rollout), OPTIONS)
                kl = actor.update(batch, grpo_loss(OPTIONS))["ref_kl"]
                at("updated")
            temperature = 1.0 if kl < 0.01 else 1.1
            options = dataclasses.replace(OPTIONS, temperature=temperature + (noise and number == 1) * noise)
            at("ends")


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    run = FinishedRun(run_dir)
    digests = [
        {name: (call.get("weights"), call.get("new_weights"), call.get("new_states")) for name, call in each.items()}
        for each in (line["calls"] for line in run.metrics)
    ]
    return [of_step | {"digests": calls} for of_step, calls in zip(statistics(run), digests, strict=True)]


POINTS = [(0, "begun"), (3, "updated"), (5, "fetched"), (6, "ends")]


def test_a_program_that_is_run_again_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """It is answered from the record up to the newest checkpoint."""
    learning(tmp_path, "whole")
    for place in POINTS:
        with pytest.raises(DiesError):
            learning(tmp_path, "run", dies=place)
        assert not multiprocessing.active_children()
    learning(tmp_path, "run")
    assert lines_of(tmp_path / "run") == lines_of(tmp_path / "whole")
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "resumed"] == [2, 4, 6]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"dtype": "float64"}, {"dtype": "bfloat16", "reproducible": "layout"}])
def test_a_program_goes_on_with_another_number_of_workers(settings: dict[str, str], tmp_path: Path) -> None:
    """Within rounding; with the option all bits are the same."""
    learning(tmp_path, "whole", **settings)
    with pytest.raises(DiesError):
        learning(tmp_path, "run", dies=(5, "fetched"), **settings)
    learning(tmp_path, "run", **settings, num_workers=1)
    run, whole = FinishedRun(tmp_path / "run"), FinishedRun(tmp_path / "whole")
    assert [line["num_workers"] for line in run.metrics] == [2, 2, 2, 2, 1, 1, 1]
    if "reproducible" in settings:
        assert lines_of(run.path) == lines_of(whole.path)
    for one, other in zip(statistics(run), statistics(whole), strict=True):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-9)


def test_models_saved_within_rounds_push_no_checkpoint_out(tmp_path: Path) -> None:
    """And what an earlier start saved behind the checkpoint is saved anew: the program may do something else now."""

    def program(sign: int) -> None:
        with started(tmp_path, num_workers=1, dtype="float32", checkpoint_every=2) as cluster:
            actor = cluster.policy(lr=1e-2)
            for number, prompts in enumerate(prompts_of(cluster, tmp_path, 4)):
                rollout = actor.generate(prompts, OPTIONS)
                if number > 1:
                    actor.save(str(tmp_path / f"out-{number}"))
                scores = [letters(text) * (sign if number > 1 else 1) for text in rollout.texts()]
                actor.update(group_advantages(rollout, scores, None, BETWEEN), grpo_loss(BETWEEN))["actor_loss"]
                if number == 3:
                    raise DiesError

    saved = []
    for sign in (1, -1):
        with pytest.raises(DiesError):
            program(sign)
        saved.append([(tmp_path / f"out-{number}/model.safetensors").read_bytes() for number in (2, 3)])
    assert saved[0][0] == saved[1][0]
    assert saved[0][1] != saved[1][1]
    started_from = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in started_from if event["event"] == "resumed"] == [2]


def test_a_program_that_decides_otherwise_is_told_where(tmp_path: Path) -> None:
    with pytest.raises(DiesError):
        learning(tmp_path, "run", dies=(5, "fetched"))
    with pytest.raises(UserError, match=r"test_live.py:\d+: round 3: the program calls actor_generate~3, and called"):
        learning(tmp_path, "run", noise=1)
    with pytest.raises(UserError, match=r"the program declares dtype otherwise than before"):
        learning(tmp_path, "run", dtype="float32")
    with pytest.raises(DiesError):  # on one worker, from the checkpoint of two
        learning(tmp_path, "run", dies=(6, "fetched"), num_workers=1)
    assert [line["num_workers"] for line in FinishedRun(tmp_path / "run").metrics] == [2, 2, 2, 2, 1, 1]


def test_a_run_of_a_program_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with started(tmp_path, num_workers=1) as cluster:
        actor = cluster.policy()
        for prompts in prompts_of(cluster, tmp_path, 1):
            actor.generate(prompts, OPTIONS)
    run_dir = str(tmp_path / "run")
    for words in (
        ["run", str(ready_file("grpo")), "--resume", "--run-dir", run_dir],
        ["verify", run_dir, "--step", "1"],
        ["replan", run_dir],
    ):
        assert cli.main(words) == 2
        assert "of the live program" in capsys.readouterr().err
    assert cli.main(["report", run_dir]) == 0
    assert "LiveProgram" in (tmp_path / "run/report.html").read_text()
    capsys.readouterr()
    assert cli.main(["status", run_dir]) == 0
    said = capsys.readouterr().out
    assert "step 1;" in said
    assert "verify" not in said


PROGRAM = """
import sys
import realhf
from realhf.algorithms.grpo.config import GRPO, group_advantages, grpo_loss
from realhf.algorithms.sft.config import sft_loss
from realhf.api import DecoderConfig

SMALL = DecoderConfig(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=4, vocab_size=32)
grpo = GRPO(max_new_tokens=6, samples_per_prompt=4, beta=0.0)
run_dir, data = sys.argv[1:]
with realhf.start(
    num_workers=2, run_dir=run_dir, tokenizer=data + "/tokenizer.json", architecture=SMALL, checkpoint_every=2
) as cluster:
    actor = cluster.policy(lr=1e-2)
    for prompts in cluster.data(data + "/prompts.jsonl", batch_size=16, steps=12):
        rollout = actor.generate(prompts, grpo)
        scores = [len(set(text)) for text in rollout.texts()]
        for _ in range(1 + scores[0] % 2):
            actor.update(group_advantages(rollout, scores, None, grpo), grpo_loss(grpo))["actor_loss"]
"""


@pytest.mark.slow
def test_a_program_that_is_killed_at_any_moment_leaves_nothing_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    data = sort_task.ensure(tmp_path / "data")
    (tmp_path / "program.py").write_text(PROGRAM)
    moments = random.Random(7)

    def begun(run_dir: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / run_dir), str(data)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    whole = begun("whole")
    assert whole.wait(PATIENCE_S) == 0, whole.stderr and whole.stderr.read().decode()
    starts, reached = 0, 0
    while True:
        program, starts = begun("run"), starts + 1
        reached += moments.randint(0, 3)
        made = tmp_path / "run/metrics.jsonl"
        while program.poll() is None and not (made.exists() and made.read_bytes().count(b"\n") >= reached):
            time.sleep(0.02)
        time.sleep(moments.uniform(0, 0.5))
        if program.poll() is not None:
            assert program.returncode == 0, program.stderr and program.stderr.read().decode()
            break
        program.kill()
        program.wait()
        wait_until(lambda: not processes_of(tmp_path / "run"), "the end of all processes")
    assert starts > 3
    assert lines_of(tmp_path / "run") == lines_of(tmp_path / "whole")


def processes_of(path: Path) -> list[Path]:
    return [command for command in Path("/proc").glob("[0-9]*/cmdline") if bytes(path) in read_if_there(command)]


def read_if_there(command: Path) -> bytes:
    with contextlib.suppress(OSError):  # it has ended
        return command.read_bytes()
    return b""


def test_a_program_is_no_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "program.py").write_text("import realhf\nwith realhf.start() as cluster:\n    1 / 0\n")
    assert cli.main(["run", str(tmp_path / "program.py")]) == 2
    assert "is a live program, and no experiment; start it with `python " in capsys.readouterr().err
