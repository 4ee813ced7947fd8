"""Whether rewards teach a policy anything: they do not where all responses to a prompt have the same one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realhf.rundir.run import RunSpec

# Steps in a row, or all steps of a shorter run.
PATIENCE = 5


class RewardWatch:
    """Says once that rewards have been uniform for `PATIENCE` steps: those of each group, where steps have the
    statistic `informative_groups`, else the mean of each step.

    Args:
        is_told: an earlier start of the run has said it.
    """

    def __init__(self, *, is_told: bool):
        self._is_told = is_told
        self._mean: float | None = None
        self._first = self._since = 0  # the first step of this start, and of those with uniform rewards

    def step(self, line: Mapping[str, Any], *, is_last: bool) -> str:
        """The sentence after another step, a line of metrics.jsonl; "" where there is none.

        is_last: no step comes behind it.
        """
        step, mean = line["step"], line.get("reward_mean")
        shares = [value for name, value in line.items() if name.endswith("informative_groups")]
        self._first = self._first or step
        self._since = self._since or step
        is_uniform = not any(shares) if shares else mean is not None and mean == self._mean
        self._mean = mean
        if not is_uniform:
            self._since = step + bool(shares)
            return ""
        is_long = step - self._since + 1 >= PATIENCE or (is_last and self._since == self._first)
        if self._is_told or not is_long:
            return ""
        self._is_told = True
        same = "all responses to a prompt had the same reward" if shares else "the mean reward was the same"
        value = "" if mean is None else f" (reward_mean {mean:.4g})"
        failures = line.get("reward_failures", 0.0)
        failed = f", and reward functions failed on {failures:.0%} of the responses" if failures else ""
        return f"the rewards teach nothing: in steps {self._since} to {step} {same}{value}{failed}"


def remedies(spec: RunSpec, run_dir: Path, *, is_zero: bool) -> str:
    """The user's next steps where rewards are uniform."""
    samples = f"`realhf status {run_dir} --samples`" if spec.samples else "a run with --samples 3"
    task = "an easier task, or a model that does better" if is_zero else "a task that is neither too hard nor too easy"
    options = (f"--{name}.samples-per-prompt" for name, of in spec.values.items() if _has_groups(of))
    groups = "".join(f", or larger groups ({option})" for option in list(options)[:1])
    return f"{samples} shows responses: does the reward find the answers in them? If so, take {task}{groups}"


def _has_groups(options: Any) -> bool:
    return isinstance(options, dict) and options.get("samples_per_prompt", 1) > 1
