"""The form of a reward function, told by the names of its parameters alone; and the arguments of its calls."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from realhf.base.errors import UserError

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)

Style = Literal["texts", "trl", "verl"]

_BATCH_MARK = "realhf_batch"

# The parameter that takes the response says which form a function has, and whether its names are plural.
_FORMS: Mapping[str, tuple[Style, bool]] = {
    "response": ("texts", False),
    "completion": ("texts", False),
    "responses": ("texts", True),
    "completions": ("trl", True),
    "solution_str": ("verl", False),
    "solution_strs": ("verl", True),
}

# The parameters that a function of each form can have besides the columns of the data.
_GIVEN: Mapping[tuple[Style, bool], tuple[str, ...]] = {
    ("texts", False): ("prompt", "response", "completion", "response_length", "response_ids", "response_tokens"),
    ("texts", True): ("prompts", "responses", "response_lengths", "response_ids", "response_tokens"),
    ("trl", True): ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"),
    ("verl", False): ("data_source", "solution_str", "ground_truth", "extra_info"),
    ("verl", True): ("data_sources", "solution_strs", "ground_truths", "extra_infos"),
}

# **row does not get these: second names of others, and rarely used ones.
_UNASKED = ("completion", "response_length", "response_lengths", "response_ids", "response_tokens")

# The columns that verl's parameters are read from.
_VERL_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "data_source": ("data_source",),
    "ground_truth": ("ground_truth", "reward_model"),
}


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A response with its prompt, tokens and row, as reward functions see it.

    id, step: of the sample in the run; step counts from 0, and messages count from 1. In an evaluation `step` is that
        which comes next. `steps`: those of the whole run.
    prompt, response: texts. `tokens` are those of the response where a function asks for them, `num_tokens` their
        number where it differs; `token_texts` says for each what text it adds, where a function asks for that.
    messages: the prompt as a chat, where the data are chats.
    row: the columns of its row of the data set.
    """

    id: int
    step: int
    steps: int = 0
    prompt: str
    response: str
    tokens: tuple[int, ...] = ()
    num_tokens: int | None = None
    token_texts: tuple[str, ...] = ()
    messages: list[dict[str, Any]] | None = None
    row: dict[str, Any] = {}

    @property
    def length(self) -> int:
        """The number of the response's tokens."""
        return len(self.tokens) if self.num_tokens is None else self.num_tokens

    @property
    def question(self) -> str:
        """The part of the prompt that is this row's own, without what a template puts around it: the last message of a
        chat, else the longest text of the row that the prompt has, else all of the prompt."""
        turns = [turn.get("content") for turn in self.messages or ()][-1:]
        texts = [text for text in turns or self.row.values() if isinstance(text, str) and text.strip() in self.prompt]
        return max(texts, key=len, default="") or self.prompt


def batch(function: F) -> F:
    """Marks a function that takes lists although its parameters are `prompt`, `response` and names of columns."""
    setattr(function, _BATCH_MARK, True)
    return function


@dataclass(frozen=True)
class Signature:
    """How to call a function.

    is_batch: it takes lists, one element a sample, and returns a list.
    given: the names that it can have besides the columns of the data.
    required, optional: names of its parameters without and with a default.
    takes_rest: it has `**row` for all that its other parameters do not name.
    """

    style: Style
    is_batch: bool
    is_async: bool
    given: tuple[str, ...]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_rest: bool

    def missing(self, columns: Collection[str]) -> list[str]:
        """The parameters without a default for which neither a call nor a data set of `columns` has a value."""
        sources = _VERL_COLUMNS if self.style == "verl" else {}
        there = {*columns, *(name for name in self.given if name.removesuffix("s") not in sources)}
        return [name for name in self.required if there.isdisjoint(sources.get(name.removesuffix("s"), (name,)))]

    @property
    def _sources(self) -> list[tuple[str, ...]]:
        """By parameter without a default for a column: the columns that it may be of, the first one that there is."""
        sources = _VERL_COLUMNS if self.style == "verl" else {}
        asked = {name: sources.get(name.removesuffix("s")) for name in self.required}
        return [its or (name,) for name, its in asked.items() if its or name not in self.given]

    @property
    def columns_asked(self) -> tuple[str, ...]:
        """The columns from which parameters without a default may have their values."""
        return tuple(column for its in self._sources for column in its)

    def columns_read(self, columns: Collection[str]) -> list[str]:
        """Those of a data set's `columns` from which parameters without a default have their values."""
        return [column for its in self._sources for column in [one for one in its if one in columns][:1]]

    @property
    def wants_tokens(self) -> bool:
        """Whether it is to have the tokens of responses."""
        return self._has("response_ids") or self._has("completion_ids", of_rest=self.takes_rest)

    @property
    def wants_token_texts(self) -> bool:
        """Whether it is to have the text of each token."""
        return self._has("response_tokens")

    def _has(self, name: str, *, of_rest: bool = False) -> bool:
        return name in self.given and (of_rest or name in self.required + self.optional)

    def arguments(self, samples: Sequence[Sample], of_call: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The keyword arguments of a call: lists in a batch, else the values of the only sample; in TRL's form also
        those of the whole call, `of_call` by name (`realhf.rewards.noted`)."""
        assert self.is_batch or len(samples) == 1, f"{len(samples)} samples for a function of one"
        each = [self._arguments(sample) for sample in samples]
        if not self.is_batch:
            return each[0]
        # A column that some rows lack is None there; one that no row has keeps the parameter's default.
        names = dict.fromkeys(name for one in each for name in one)
        arguments: dict[str, Any] = {name: [one.get(name) for one in each] for name in names}
        taken = of_call if of_call and self.style == "trl" else {}
        named = self.required + self.optional
        return arguments | {name: value for name, value in taken.items() if self.takes_rest or name in named}

    def _arguments(self, sample: Sample) -> dict[str, Any]:
        given = {name: value for name, value in _values(sample, self.style).items() if name in self.given}
        values = {**sample.row, **given}
        named = {name: values.get(name) for name in self.required}
        named |= {name: values[name] for name in self.optional if name in values}
        rest = {name: value for name, value in values.items() if name not in _UNASKED} if self.takes_rest else {}
        return rest | named


def _values(sample: Sample, style: Style) -> dict[str, Any]:
    """Per name of `_GIVEN` its value."""
    match style:
        case "texts":
            values = {"prompt": sample.prompt, "response": sample.response, "response_length": sample.length}
            of_tokens = {"response_ids": list(sample.tokens), "response_tokens": list(sample.token_texts)}
            return {**values, **_plural(values), **of_tokens, "completion": sample.response}
        case "trl":
            return {**_trl_texts(sample), "completion_ids": list(sample.tokens)}
        case "verl":
            values = _verl_values(sample)
            return {**values, **_plural(values)}


def _plural(values: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}s": value for name, value in values.items()}


def _trl_texts(sample: Sample) -> dict[str, Any]:
    """TRL gives chats as messages: the prompt's, and the response as a list of one."""
    if sample.messages is None:
        return {"prompts": sample.prompt, "completions": sample.response}
    return {"prompts": sample.messages, "completions": [{"role": "assistant", "content": sample.response}]}


def _verl_values(sample: Sample) -> dict[str, Any]:
    """verl's data have the right answer in a column of its own or in `reward_model`."""
    row = sample.row
    model = row.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, dict) else None
    return {
        "data_source": row.get("data_source"),
        "solution_str": sample.response,
        "ground_truth": row.get("ground_truth", truth),
        "extra_info": row.get("extra_info"),
    }


def recognise(function: Function, name: str) -> Signature:
    """The form of `function`, called `name` in messages.

    Raises:
        UserError: its parameters are those of no form.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: its parameters cannot be read ({error}); write it as a Python function") from None
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    positional = [p.name for p in named.values() if p.kind is p.POSITIONAL_ONLY]
    if positional:
        raise UserError(
            f"{name}: arguments are given by name, and {', '.join(positional)} can have none; remove the `/` behind it"
        )
    found = [parameter for parameter in named if parameter in _FORMS]
    if len(found) != 1:
        what = f"takes {' and '.join(found)}, and a reward takes one of them" if found else "does not take the response"
        raise UserError(
            f"reward {name} has the parameters ({', '.join(map(str, parameters))}), and {what}; write it as (prompt, "
            "response, ...), in lists as (prompts, responses, ...), as TRL's (prompts, completions, **kwargs) or as "
            "verl's (data_source, solution_str, ground_truth, extra_info)"
        )
    [form] = found
    style, is_plural = _FORMS[form]
    call = getattr(type(function), "__call__", None)  # noqa: B004 (the method is looked at, not whether it is there)
    return Signature(
        style,
        is_plural or getattr(function, _BATCH_MARK, False),
        inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call),
        _GIVEN[style, is_plural],
        tuple(p.name for p in named.values() if p.default is p.empty),
        tuple(p.name for p in named.values() if p.default is not p.empty),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def asking_for(function: F, *names: str) -> F:
    """`function`, which takes `**row`, with parameters of these names for all who read its signature."""
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function
