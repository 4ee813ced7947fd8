"""The arguments of TRL's reward functions besides samples: the state of the training, `log_metric` and `log_extra`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from realhf.rewards.details import Scalar
from realhf.rewards.signature import Sample
from realhf.rewards.values import as_number, shown

MAX_COLUMNS = 16
_LONGEST_NAME, _LONGEST_TEXT = 64, 2000
_INT64 = range(-(2**63), 2**63)
# Statistics of the rewards themselves begin with this, and what stands beside a sample for each function.
_TAKEN = "reward_"
# Columns that every table of samples has.
_OF_SAMPLES = ("sample", "prompt", "response", "reward")


@dataclass(frozen=True)
class TrainerState:
    """TRL's `trainer_state`, with the two attributes that a run can state.

    global_step: training steps that were made before the responses were drawn. max_steps: those of the whole run.
    """

    global_step: int
    max_steps: int

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"trainer_state has global_step and max_steps here, and no {name!r}; use these two")


@dataclass
class Noted:
    """Takes what a function logs in one call for `samples`."""

    samples: Sequence[Sample]
    _metrics: dict[str, list[float]] = field(default_factory=dict)
    _columns: dict[str, list[Scalar]] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a function of TRL's form besides its samples."""
        state = TrainerState(self.samples[0].step, self.samples[0].steps)
        return {"trainer_state": state, "log_extra": self.log_extra, "log_metric": self.log_metric}

    def log_metric(self, name: str, value: float) -> None:
        """Notes a number of the call. Raises ValueError for a name that is taken, BadValueError for a value that is no
        finite number."""
        _check_name("log_metric", name)
        if name.startswith(_TAKEN):
            raise ValueError(f"log_metric({name!r}, ...): names with {_TAKEN} are of the rewards; choose another")
        number = as_number(value)
        if not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}, {number}): the value must be finite; log it where there is one")
        self._metrics.setdefault(name, []).append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Notes one value for each sample of the call. Raises ValueError if there are not as many, or for a name
        that is taken."""
        _check_name("log_extra", column)
        if column in _OF_SAMPLES or column.startswith(_TAKEN):
            raise ValueError(
                f"log_extra({column!r}, ...): tables of samples have columns {', '.join(_OF_SAMPLES)} and {_TAKEN}NAME "
                "already; choose another name"
            )
        values = list(values)
        if len(values) != len(self.samples):
            raise ValueError(
                f"log_extra({column!r}, ...) got {len(values)} values for {len(self.samples)} samples; give one each"
            )
        if column not in self._columns and len(self._columns) == MAX_COLUMNS:
            raise ValueError(f"log_extra({column!r}, ...): there are {MAX_COLUMNS} columns already; log fewer")
        self._columns[column] = [_scalar(value) for value in values]

    @property
    def metrics(self) -> dict[str, float]:
        """By name the mean of the values."""
        return {name: sum(values) / len(values) for name, values in self._metrics.items()}

    def extra(self, place: int) -> dict[str, Scalar]:
        """The columns of one of the samples."""
        return {column: values[place] for column, values in self._columns.items()}


def _check_name(what: str, name: Any) -> None:
    if not (isinstance(name, str) and name.isprintable() and 1 <= len(name) <= _LONGEST_NAME):
        raise ValueError(f"{what}({shown(name)}, ...): give a printable name of at most {_LONGEST_NAME} characters")


def _scalar(value: Any) -> Scalar:
    """The value, if it has a form in JSON, else a text of it; long texts are cut."""
    if callable(getattr(value, "item", None)) and getattr(value, "size", None) == 1:
        value = value.item()  # NumPy's
    if value is None or isinstance(value, bool):
        return value
    if (isinstance(value, int) and value in _INT64) or (isinstance(value, float) and math.isfinite(value)):
        return value
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
