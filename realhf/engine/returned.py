"""Checks the results of an algorithm's code where they are taken: results of calls, and of callbacks."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Real
from types import NoneType
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from realhf.dataflow.interface import RESERVED_STATISTICS, SampleDType
from realhf.engine.interface import CallResult, Stats
from realhf.rewards.details import RewardDetails

SAMPLE_DTYPES = tuple(getattr(torch, name) for name in get_args(SampleDType))

# By part of `RewardDetails` the types of its values, in words with the remedy.
_DETAILS: dict[str, tuple[tuple[type, ...], str]] = {
    "rewards": ((float, int, NoneType), "a number or None under a text; give float(...) of it"),
    "columns": ((str,), "a text under a text; give str(...) of it"),
    "notes": ((str, float, int, bool, NoneType), "a text, a number, a bool or None under a text; give str(...) of it"),
}

MAX_STATE, MAX_STATE_NAME = 64, 64  # numbers that a call keeps from step to step, and characters of a name


class InterfaceError(Exception):
    """The result of an interface or of one of its callbacks breaks a rule; the text names key, sample, value and
    rule."""


def check_result(
    result: Any, ids: Sequence[int], *, declared: Collection[str], recorded: Collection[str], holds_outputs: bool
) -> CallResult:
    """The parts of a call's result that are taken: outputs that the call declares or the run records, and statistics as
    floats.

    The rules are those of `CallResult`. Values that are recorded only may be NaN or infinite: they are for looking at.

    Args:
        ids: ids of the samples of the call's batch.
        holds_outputs: if false, nothing is taken and only the type is checked.

    Raises:
        InterfaceError: the result breaks a rule.
    """
    if not isinstance(result, CallResult):
        raise InterfaceError(
            f"the result is {_shown(result)}, must be a CallResult; return CallResult(...) on every path, an empty one "
            "where context.holds_outputs is false"
        )
    if not holds_outputs:
        return CallResult()
    outputs = _checked_dict(result.outputs, "the outputs are", "tensors by key")
    if missing := [key for key in declared if key not in outputs]:
        raise InterfaceError(
            f"the call declares the output {missing[0]!r}, and the result has {', '.join(map(str, outputs)) or 'none'}"
            "; return every key of output_data where context.holds_outputs is true"
        )
    taken = {}
    for key, values in outputs.items():
        if key in declared or key in recorded:
            check_column(f"output {key!r}", values, ids, finite=key in declared)
            taken[key] = [value.detach() for value in values]
    return CallResult(outputs=taken, stats=check_stats(result.stats), details=check_details(result.details, ids))


def check_columns(columns: Any, ids: Sequence[int], *, finite: bool) -> dict[str, list[Tensor]]:
    """The checked result of a `Postprocess` for the samples `ids`. Raises InterfaceError."""
    columns = _checked_dict(columns, "the function given to model.forward returned", "tensors by key")
    for key, values in columns.items():
        check_column(f"column {key!r} of the function given to model.forward", values, ids, finite=finite)
    return columns


def check_column(what: str, values: Any, ids: Sequence[int], *, finite: bool) -> None:
    """Raises InterfaceError unless `values` are one tensor [length, ...] a sample, alike but for their lengths."""
    if not isinstance(values, list | tuple):
        raise InterfaceError(f"{what} is {_shown(values)}, must be a list of one tensor [length, ...] a sample")
    if len(values) != len(ids):
        raise InterfaceError(
            f"{what} has {len(values)} tensors for {len(ids)} samples; return one a sample, in the order of batch.ids"
        )
    for sample, value in zip(ids, values, strict=True):
        _check_value(f"{what}, sample {sample}", value)
        if (value.dtype, value.shape[1:]) != (values[0].dtype, values[0].shape[1:]):
            raise InterfaceError(
                f"{what}, sample {sample}, is {_shown(value)}, but sample {ids[0]} has {_shown(values[0])}; all "
                "samples of a key have one dtype, and one shape behind the length"
            )
    if finite and not _all_finite(values):
        sample, value = next(pair for pair in zip(ids, values, strict=True) if not pair[1].isfinite().all())
        place = (~value.isfinite()).nonzero()[0].tolist()
        raise InterfaceError(
            f"{what}, sample {sample}, has {value[tuple(place)].item()} at {place}, must be finite; look at the "
            "weights it comes from (and the learning rate that made them), at divisions and logarithms"
        )


def check_stats(stats: Any) -> Stats:
    """Statistics with pairs of Python floats. Raises InterfaceError."""
    [numbers] = _read([stats])
    checked = {}
    for name, pair in _checked_dict(numbers, "the statistics are", "pairs (sum, weight) by name").items():
        if not (isinstance(name, str) and name and name.isprintable()):
            raise InterfaceError(f"a statistic is named {name!r}, must be a printable string")
        if name in RESERVED_STATISTICS:
            raise InterfaceError(
                f"statistic {name!r} has a name that every line of metrics.jsonl has already; choose another than "
                f"{', '.join(sorted(RESERVED_STATISTICS))}"
            )
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2 and all(map(_is_finite_number, pair))
        if not is_pair or pair[1] < 0:
            raise InterfaceError(
                f"statistic {name!r} is {_shown(pair)}, must be a pair (sum, weight) of finite numbers, the weight at "
                "least 0; its mean is sum / weight, and mean_of(tensor) makes such a pair"
            )
        checked[name] = (float(pair[0]), float(pair[1]))
    return checked


def check_details(details: Any, ids: Sequence[int]) -> dict[int, RewardDetails]:
    """The checked details of samples. Raises InterfaceError."""
    for sample, of in _checked_dict(details, "the details are", "RewardDetails by sample").items():
        if sample not in ids:
            raise InterfaceError(f"the details have sample {sample!r}, which is none of the call's: {_listed(ids)}")
        if not isinstance(of, RewardDetails):
            raise InterfaceError(
                f"the details of sample {sample} are {_shown(of)}, must be RewardDetails (of realhf.rewards.details)"
            )
        for part, (kinds, words) in _DETAILS.items():
            named = _checked_dict(getattr(of, part), f"the {part} of sample {sample} are", "values by name")
            for name, value in named.items():
                if not isinstance(name, str) or type(value) not in kinds:
                    raise InterfaceError(
                        f"the {part} of sample {sample} have {name!r}: {_shown(value)}, must be {words}"
                    )
    return dict(details)


def check_state(state: Any) -> dict[str, float]:
    """The numbers that a call leaves for the next step, as Python floats. Raises InterfaceError."""
    numbers = _checked_dict(state, "context.state is", "numbers by name")
    if len(numbers) > MAX_STATE:
        raise InterfaceError(
            f"context.state has {len(numbers)} numbers, must have at most {MAX_STATE}; it is for a few coefficients "
            "and moments, which travel with every call"
        )
    for name, number in numbers.items():
        if not (isinstance(name, str) and name.isprintable() and 1 <= len(name) <= MAX_STATE_NAME):
            raise InterfaceError(
                f"context.state has the name {name!r}, must be a printable string of 1 to {MAX_STATE_NAME} characters"
            )
        if not _is_finite_number(number):
            raise InterfaceError(
                f"context.state[{name!r}] is {_shown(number)}, must be a finite number: keep float(...) of it"
            )
    return {name: float(number) for name, number in numbers.items()}


@dataclass(frozen=True)
class UnreadLoss:
    """The loss and the statistics of the samples `ids` of a micro-batch, which may not be computed yet."""

    ids: Sequence[int]
    loss: Tensor
    stats: Any


def check_loss(given: Any, ids: Sequence[int]) -> tuple[Tensor, UnreadLoss]:
    """The loss of a `LossFunction`'s result of the right form, and what `read_losses` is to read and check. Raises
    InterfaceError."""
    if not (isinstance(given, tuple | list) and len(given) == 2):
        raise InterfaceError(f"the loss function returned {_shown(given)}, must be a pair (loss, statistics)")
    loss, stats = given
    is_scalar = isinstance(loss, Tensor) and loss.dim() == 0 and loss.dtype.is_floating_point
    if not is_scalar or not loss.requires_grad:
        raise InterfaceError(
            f"the loss is {_shown(loss)}{', without a gradient' if is_scalar else ''}, must be a scalar tensor of "
            "floating point with a gradient: the sum of its terms, computed from the output of the model's head"
        )
    return loss, UnreadLoss(ids, loss.detach(), stats)


def read_losses(unread: Sequence[UnreadLoss]) -> list[tuple[float, Stats]]:
    """The loss and the statistics of each micro-batch, with one wait for the device. Raises InterfaceError."""
    *stats, losses = _read([*(each.stats for each in unread), {"loss": [each.loss for each in unread]}])
    for each, loss in zip(unread, losses["loss"], strict=True):
        if not math.isfinite(loss):
            raise InterfaceError(
                f"the loss of samples {_listed(each.ids)} is {loss}, must be finite; lower the learning rate, or look "
                "for values that overflow in the loss. The parameters are as before this mini-batch"
            )
    return [(loss, check_stats(of)) for loss, of in zip(losses["loss"], stats, strict=True)]


def _read(parts: Sequence[Any]) -> list[Any]:
    """The same dicts of lists with numbers in place of scalar tensors, with one wait for their device; anything else is
    left as it is."""
    lists = [values for part in parts if isinstance(part, dict) for values in part.values()]
    tensors = [x for values in lists if isinstance(values, tuple | list) for x in values if _is_number_on_device(x)]
    numbers = iter(torch.stack([x.detach().double() for x in tensors]).tolist() if tensors else ())

    def read(values: Any) -> Any:
        if not isinstance(values, tuple | list):
            return values
        found = (next(numbers) if _is_number_on_device(x) else x for x in values)
        return tuple(found) if isinstance(values, tuple) else list(found)

    return [{name: read(values) for name, values in part.items()} if isinstance(part, dict) else part for part in parts]


def _is_number_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.dtype.is_floating_point


def check_end(answer: Any) -> bool:
    """The checked result of an `EndCheck`. Raises InterfaceError."""
    if not isinstance(answer, bool | np.bool_):
        raise InterfaceError(f"is_end, given to model.generate, returned {_shown(answer)}, must be True or False")
    return bool(answer)


def _check_value(what: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise InterfaceError(f"{what}, is {_shown(value)}, must be a tensor [length, ...]")
    if value.dim() == 0:
        raise InterfaceError(f"{what}, is a tensor [], must be [length, ...]; a scalar of a sample is [1]: .view(1)")
    if 0 in value.shape[1:] or value.layout is not torch.strided:
        raise InterfaceError(f"{what}, is {_shown(value)}, must be dense, and not empty but for its length")
    if value.dtype not in SAMPLE_DTYPES:
        names = ", ".join(get_args(SampleDType))
        raise InterfaceError(f"{what}, is {_shown(value)}, must be of one of the dtypes {names}; use .to(...)")


def _all_finite(values: Sequence[Tensor]) -> bool:
    """With one wait for the device, not one a sample."""
    return bool(torch.stack([value.isfinite().all() for value in values]).all())


def _checked_dict(value: Any, what: str, of: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise InterfaceError(f"{what} {_shown(value)}, must be a dict: {of}")
    return value


def _is_finite_number(value: Any) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _listed(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids[:8])) + (f", ... ({len(ids)} in all)" if len(ids) > 8 else "")


def _shown(value: Any) -> str:
    """A value in few words."""
    match value:
        case Tensor():
            kind = "" if value.layout is torch.strided else "sparse "
            return f"a {kind}tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
        case None | bool() | int() | float():
            return repr(value)
        case tuple() | list() if len(value) <= 2:
            brackets = "()" if isinstance(value, tuple) else "[]"
            return f"{brackets[0]}{', '.join(map(_shown, value))}{brackets[1]}"
        case _:
            return f"a {type(value).__name__}"
