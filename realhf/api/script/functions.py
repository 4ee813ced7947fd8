"""Functions that run on the workers, within calls: tensor functions, losses, and how a loss is reduced."""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from realhf.api.script.columns import Symbolic
from realhf.api.script.lines import script_error
from realhf.base.errors import UserError
from realhf.base.numbers import check_range
from realhf.dataflow.interface import ANY_NAME, bound_names, source_tree

# A function, or the name of one as MODULE:NAME, whose module is imported on the workers alone.
Named = Callable[..., Any] | str


def load(name: str) -> Any:
    """What MODULE:NAME names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def load_function(function: Named) -> Callable[..., Any]:
    """The function itself; one that is named is imported."""
    if not isinstance(function, str):
        return function
    found = load(function)
    return load_function(getattr(found, "function", found))  # one that is marked in its own module


def check_function(function: Named) -> None:
    """Looks for a function that is named as MODULE:NAME, without importing the module.

    Raises:
        UserError: it is no such name, there is no such module, or its source binds no such name.
    """
    if not isinstance(function, str):
        return
    module, _, name = function.partition(":")
    if not (module and name.isidentifier()):
        raise UserError(f"{function!r} names no function; give MODULE:NAME, such as my_losses:clipped")
    try:
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):  # a package above it; __main__
        spec = None
    if spec is None:
        raise UserError(
            f"{function!r}: there is no module {module!r}; put the file {module.rpartition('.')[2]}.py beside the "
            "script's, or install the package"
        )
    if not (spec.origin and spec.origin.endswith(".py")):
        return  # the workers will see
    if not bound_names(source_tree(repr(function), spec.origin)) & {name, *ANY_NAME}:
        raise UserError(f"{function!r}: {spec.origin} has no function {name!r}; correct the name")


def check_in_script(function: Named) -> None:
    """As `check_function`; errors begin with the line of the script, which may lie in another file than the script."""
    try:
        check_function(function)
    except UserError as error:
        raise script_error(str(error)) from None


def describe_function(function: Named) -> str:
    """Its name, for messages."""
    return function.partition(":")[2] if isinstance(function, str) else getattr(function, "__name__", repr(function))


ReductionKind = Literal["token_mean", "sequence_mean", "sequence_sum_over"]


@dataclass(frozen=True)
class Reduction:
    """How losses of tokens become the loss of a mini-batch; `over` is the constant of `sequence_sum_over`."""

    kind: ReductionKind
    over: float = 1.0


TOKEN_MEAN = Reduction("token_mean")
"""The mean over the response tokens of the global mini-batch."""

SEQUENCE_MEAN = Reduction("sequence_mean")
"""The mean over the tokens of each response, then over the responses of the global mini-batch."""


def sequence_sum_over(constant: float) -> Reduction:
    """The sum over the tokens of each response, divided by `constant`, then the mean over the responses (Dr. GRPO)."""
    return Reduction("sequence_sum_over", check_range("sequence_sum_over", constant, 1e-9, 1e12))


def reduction_of(given: Any) -> Reduction:
    """A reduction, or the name of one that needs no number. Raises UserError."""
    match given:
        case Reduction():
            return given
        case "token_mean" | "sequence_mean":
            return Reduction(given)
    raise UserError(f"reduction={given!r} is not known; give token_mean, sequence_mean, or sequence_sum_over(a number)")


@dataclass(frozen=True)
class TensorFunction:
    """See `tensor_function`. Outside an experiment it is the function itself."""

    function: Named
    __name__: str = field(default="", compare=False)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        for value in (*arguments, *keywords.values()):
            if isinstance(value, Symbolic):
                return value._apply(self, arguments, keywords)
        return load_function(self.function)(*arguments, **keywords)


def tensor_function(function: Named) -> TensorFunction:
    """Marks plain tensor code that an experiment may call: it runs on the workers, within the call that reads its
    result.

    `function(*columns, *others, context) -> dict[str, list[Tensor]]` gets a `Columns` for each argument that stands for
    values of the step, and all others as they are; `context` (`realhf.engine.interface.Context`) only if it has such a
    parameter. It sees all samples of the call on its data-parallel rank, of all mini-batches. Its result are further
    columns, one tensor [length, ...] a sample, or a pair of these and statistics. In the experiment the result has the
    columns of all arguments as well; of columns with one name, the later ones.

    Args:
        function: a function, or MODULE:NAME of one that imports torch.
    """
    return TensorFunction(function, describe_function(function))


@dataclass(frozen=True)
class BoundLoss:
    """A loss with its arguments after the batch, and its reduction."""

    function: Named
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    reduction: Reduction

    @property
    def name(self) -> str:
        return describe_function(self.function)

    def setting(self, name: str, default: Any) -> Any:
        """The attribute of the first of its arguments that has it."""
        values = (*self.arguments, *dict(self.keywords).values())
        return next((getattr(value, name) for value in values if hasattr(value, name)), default)


@dataclass(frozen=True)
class LossFunction:
    """See `loss_function`; calling it binds what comes after the batch."""

    function: Named
    reduction: Reduction | None = None

    def __call__(self, *arguments: Any, reduction: Reduction | str | None = None, **keywords: Any) -> BoundLoss:
        """The loss with its hyperparameters. `reduction` replaces the one that the hyperparameters name."""
        if any(isinstance(value, Symbolic) for value in (*arguments, *keywords.values())):
            raise script_error(
                f"{describe_function(self.function)} is a loss: it reads columns from the batch of update; give it "
                "hyperparameters alone"
            )
        bound = BoundLoss(self.function, arguments, tuple(keywords.items()), TOKEN_MEAN)
        chosen = reduction or bound.setting("reduction", None) or self.reduction or TOKEN_MEAN
        return BoundLoss(self.function, arguments, tuple(keywords.items()), reduction_of(chosen))


def loss_function(function: Named, reduction: Reduction | str | None = None) -> LossFunction:
    """Marks a loss, `loss(quantity, batch, *hyperparameters) -> Tensor`, or a pair of it and statistics.

    The quantity has a gradient. It is the log-probability of every response token under the model, at the rollout's
    temperature, [responses] of the micro-batch `batch` (`realhf.engine.batch.Batch`); of a value model the value of
    every response token. For `Pairs` the loss is `loss(chosen, rejected, batch, ...)` of sums of log-probabilities, or
    of scores, [pairs] each. Parameters `entropy` and `is_top` get the entropies, and whether each token is the most
    likely one, [responses]; a parameter `divergence` gets a function, see `realhf.algorithms.script.update.Divergence`.
    The result is not reduced: it has one number for each token, or each pair.

    Args:
        function: a function, or MODULE:NAME of one that imports torch.
        reduction: of the losses of tokens, by default the attribute `reduction` of the first argument that has it, else
            the mean over tokens. A column `weight` multiplies the losses of tokens; samples whose column `valid` is 0
            count nowhere.
    """
    return LossFunction(function, None if reduction is None else reduction_of(reduction))
