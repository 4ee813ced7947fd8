"""Has one or several models answer every prompt of a file, scores the answers, and prints how good each model is:
its mean reward and pass@k with 95 % intervals, and for each further model its difference to the first, tested on
the same prompts. Answers are the most likely tokens, or several drawn ones a prompt. Nothing is trained.

examples:
  realhf evaluate --model ./Qwen2.5-1.5B --data test.jsonl --reward rewards.py:correct
  realhf evaluate --model ./Qwen2.5-1.5B --model runs/grpo --data test.jsonl --reward rewards.py:correct
  realhf evaluate --model runs/grpo --data test.jsonl --reward rewards.py:correct --batch-size 128
      --generation.samples-per-prompt 8 --generation.temperature 1
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from realhf.base.errors import UserError
from realhf.base.numbers import check_range
from realhf.base.options import NEEDED, Common
from realhf.cli.command import Command
from realhf.cli.options import add_planning
from realhf.cli.output import STANDARD_OUTPUT, Phases, output_beside, table_of
from realhf.cli.progress import Progress
from realhf.cli.request import add_launcher, add_options_of_launchers, run_request
from realhf.lifecycle.controller import start
from realhf.lifecycle.new import new_run
from realhf.lifecycle.request import RunRequest, default_run_directory, experiment_of
from realhf.report.estimates import Comparison, Estimate, Values, compare, estimate, pass_at
from realhf.rundir.lines import evaluation_line, read_lines
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run
from realhf.rundir.samples import sample_line

EXPERIMENT = Path(__file__).parents[1] / "experiments" / "_evaluate.py"


def add_arguments(command: Command) -> None:
    model = "run directory or Hugging Face checkpoint; may be repeated: further models are compared with the first"
    command.add("--model", Common(model, group=NEEDED), action="append", metavar="DIR", required=True)
    command.add("--json", Common("write all figures to this file too (-: standard output)"), type=Path, metavar="FILE")
    where = "where a run directory for each model is made (default runs/evaluate-TIME)"
    command.add("--run-dir", Common(where), type=Path, metavar="FOLDER")
    passes = "an answer passes with a reward of at least X"
    command.add("--passes-at", Common(passes), "default 1", type=float, default=1.0, metavar="X")
    add_launcher(command)
    add_planning(command)
    add_options_of_launchers(command)
    command.set_defaults(experiment=str(EXPERIMENT), resume=False, detach=False)


def execute(arguments: argparse.Namespace) -> int:
    models, fields, json_file = arguments.model, arguments.overrides, arguments.json
    check_range("--passes-at", arguments.passes_at, -1e9, 1e9)
    if again := {model for model in models if models.count(model) > 1}:
        raise UserError(f"--model {min(again)} is given twice; give each model once")
    if json_file not in (None, STANDARD_OUTPUT) and not json_file.parent.is_dir():
        raise UserError(f"--json {json_file}: there is no folder {json_file.parent}; make it, or give another file")
    folder = RunDirectory(arguments.run_dir or default_run_directory("evaluate"))
    folder.check_new()
    requests = []
    for number, model in enumerate(models, 1):
        arguments.run_dir = folder.path / f"{number}-{Path(model).resolve().name}"
        arguments.overrides = ["--model", model, *fields]
        requests.append(run_request(arguments))
    for request in requests:
        _check(request)
    with Phases() as phases:
        runs = [new_run(request, phases) for request in requests]
    _check_comparable(runs)
    for model, request, run in zip(models, requests, runs, strict=True):
        with Progress(has_bar=False) as listener:
            listener.say(f"evaluating {model}")
            start(run, request, listener)
    results = [
        Result(model, request.directory, answers(run, request.directory))
        for model, request, run in zip(models, requests, runs, strict=True)
    ]
    _print(results, arguments.passes_at, json_file)
    return 0


def _check(request: RunRequest) -> None:
    """Raises UserError for what would give answers that say nothing."""
    request.launcher(request.launcher_options).check()
    source = experiment_of(request.experiment, request.fields).source
    number = source.generation.samples_per_prompt
    if number > 1 and source.generation.temperature == 0:
        raise UserError(
            f"--generation.samples-per-prompt {number} without a temperature gives one answer {number} times; give "
            "--generation.temperature too, such as 1"
        )
    if source.reward.on_error == "drop":
        raise UserError(
            "--reward.on-error drop leaves answers without a reward, and each answer counts; give fail or zero"
        )


def _check_comparable(runs: Sequence[Run]) -> None:
    """Raises UserError where models would be compared on different prompts."""
    extents = [run.experiment.dataset.check() for run in runs]
    if len(runs) > 1 and any(extent.dropped for extent in extents):
        dropped = ", ".join(str(extent.dropped) for extent in extents)
        raise UserError(
            f"--too-long drop leaves out prompts by each model's own tokens ({dropped} rows), and models are compared "
            "on the same prompts; give truncate_left or a larger limit, or evaluate each model alone"
        )


def answers(run: Run, directory: RunDirectory) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[prompts, samples a prompt]: the rewards of a finished evaluation, in the order of the data. Raises UserError if
    its file lacks some."""
    each = run.experiment.graph.samples_per_prompt
    found = {one.sample: one.reward for one in read_lines(directory.samples, sample_line).values}
    count = run.experiment.dataset.check().rows * each
    rewards = [found.get(sample) for sample in range(count)]
    if None in rewards:
        raise UserError(
            f"{directory.samples}: it has no reward of answer {rewards.index(None)} of {count}; evaluate again"
        )
    return np.array(rewards, dtype=np.float64).reshape(-1, each)


@dataclass(frozen=True)
class Result:
    """A model's scored answers. `rewards`: [prompts, samples a prompt]."""

    model: str
    directory: RunDirectory
    rewards: np.ndarray[Any, np.dtype[np.float64]]

    @property
    def of_prompts(self) -> Values:
        """[prompts]: the mean reward of the answers to each."""
        means: Values = self.rewards.mean(axis=1)
        return means

    def estimates(self, passes_at: float) -> dict[str, Estimate]:
        """The mean reward, and pass@k for k of 1, 2, 4 and so on to the number of samples."""
        samples = self.rewards.shape[1]
        passed = [int(count) for count in (self.rewards >= passes_at).sum(axis=1)]
        powers = [2**i for i in range(samples.bit_length()) if 2**i < samples]
        found = {f"pass@{k}": estimate(pass_at(k, passed, samples)) for k in (*powers, samples)}
        return {"reward": estimate(self.of_prompts), **found}


def _print(results: Sequence[Result], passes_at: float, json_file: Path | None) -> None:
    out, (first, *others) = output_beside(json_file), results
    estimates = {result.model: result.estimates(passes_at) for result in results}
    names = _short([result.model for result in results])
    prompts, samples = first.rewards.shape
    rows = ((names[model], *map(_interval, found.values())) for model, found in estimates.items())
    title = f"{prompts} prompts, answers to each: {samples}; 95 % intervals"
    out.print(table_of(title, "", *estimates[first.model], rows=rows))
    comparisons = {other.model: compare(first.of_prompts, other.of_prompts) for other in others}
    if comparisons:
        columns = ("reward", "p", "test")
        rows = ((names[model], _signed(one.difference), f"{one.p:.2g}", one.test) for model, one in comparisons.items())
        out.print(table_of(f"against {names[first.model]}, on the same prompts", "", *columns, rows=rows))
    out.say(*(f"answers and scores: {result.directory.samples}" for result in results))
    if json_file is not None:
        out.write_json(json_file, _content(results, estimates, comparisons, passes_at))


def _short(models: Sequence[str]) -> dict[str, str]:
    """By model the last part of its path, or all of it where two end alike; a table has little room."""
    ends = [Path(model).resolve().name for model in models]
    return dict(zip(models, ends if len({*ends}) == len(ends) else models, strict=True))


def _interval(one: Estimate) -> str:
    return f"{one.mean:.3f} ({one.low:.3f}-{one.high:.3f})"


def _signed(one: Estimate) -> str:
    return f"{one.mean:+.3f} ({one.low:+.3f} to {one.high:+.3f})"


def _content(
    results: Sequence[Result],
    estimates: dict[str, dict[str, Estimate]],
    comparisons: dict[str, Comparison],
    passes_at: float,
) -> dict[str, Any]:
    """The figures as JSON has them."""
    prompts, samples = results[0].rewards.shape
    models = [
        {
            "model": result.model,
            "run_dir": str(result.directory.path),
            "estimates": {name: asdict(one) for name, one in estimates[result.model].items()},
            "statistics": read_lines(result.directory.evaluations, evaluation_line).values[-1],
        }
        for result in results
    ]
    against = [{"model": model, "against": results[0].model, **asdict(one)} for model, one in comparisons.items()]
    return {
        "prompts": prompts,
        "samples_per_prompt": samples,
        "passes_at": passes_at,
        "models": models,
        "comparisons": against,
    }
