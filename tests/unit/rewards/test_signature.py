"""The form of a reward function is told by its parameters' names."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.base.errors import UserError
from realhf.rewards.signature import Signature, asking_for, batch, recognise
from tests.unit.rewards.samples import sample

ROW = {"answer": "4", "level": 3}


def arguments(function: Callable[..., Any], *samples: Any) -> dict[str, Any]:
    return recognise(function, "f").arguments(samples or (sample(row=ROW),))


def test_texts() -> None:
    def plain(prompt: str, response: str, answer: str) -> float: ...
    def other(response: str, level: int = 0, missing: int = 7) -> float: ...
    def rest(response: str, **row: Any) -> float: ...
    def length(completion: str, response_length: int) -> float: ...
    def tokens(response: str, response_ids: list[int], response_tokens: list[str]) -> list[float]: ...

    assert arguments(plain) == {"prompt": "What is 2 + 2?", "response": "4", "answer": "4"}
    assert arguments(other) == {"response": "4", "level": 3}
    assert arguments(rest) == {"prompt": "What is 2 + 2?", "response": "4", **ROW}
    assert arguments(length, sample(num_tokens=9)) == {"completion": "4", "response_length": 9}
    assert arguments(length, sample(num_tokens=0, tokens=(1, 2)))["response_length"] == 0
    assert arguments(length, sample(tokens=(1, 2)))["response_length"] == 2
    given = sample(tokens=(7, 8), token_texts=("4", ""), row=ROW)
    assert arguments(tokens, given) == {"response": "4", "response_ids": [7, 8], "response_tokens": ["4", ""]}
    assert arguments(rest, given) == {"prompt": "What is 2 + 2?", "response": "4", **ROW}


def test_the_response_is_the_model_s_even_where_the_data_have_a_column_of_that_name() -> None:
    def plain(response: str, **row: Any) -> float: ...

    assert arguments(plain, sample(row={"response": "the data's"}))["response"] == "4"


def test_batches() -> None:
    def lists(prompts: list[str], responses: list[str], answer: list[str], level: list[int]) -> list[float]: ...

    @batch
    def marked(response: list[str], answer: list[str]) -> list[float]: ...

    pair = sample(row=ROW), sample(response="5", row={"answer": "6"})
    assert arguments(lists, *pair) == {
        "prompts": ["What is 2 + 2?"] * 2,
        "responses": ["4", "5"],
        "answer": ["4", "6"],
        "level": [3, None],
    }
    assert arguments(marked, *pair) == {"response": ["4", "5"], "answer": ["4", "6"]}


def test_lists_of_texts() -> None:
    def lengths(responses: list[str], response_lengths: list[int]) -> list[float]: ...
    def tokens(responses: list[str], response_ids: list[Any], response_tokens: list[Any]) -> list[Any]: ...
    def rest(responses: list[str], **row: Any) -> list[float]: ...

    assert arguments(lengths, sample(num_tokens=9)) == {"responses": ["4"], "response_lengths": [9]}
    pair = (sample(tokens=(7, 8), token_texts=("4", "")), sample(tokens=(7,), token_texts=("4",)))
    assert arguments(tokens, *pair)["response_ids"] == [[7, 8], [7]]
    assert arguments(tokens, *pair)["response_tokens"] == [["4", ""], ["4"]]
    # What only a few ask for is not among the rest.
    assert arguments(rest) == {"prompts": ["What is 2 + 2?"], "responses": ["4"], "answer": ["4"], "level": [3]}


def test_tokens_are_wanted_where_they_are_taken() -> None:
    def named(completions: list[Any], completion_ids: list[Any]) -> list[float]: ...
    def optional(completions: list[Any], completion_ids: Any = None) -> list[float]: ...
    def column(response: str, completion_ids: Any) -> float: ...
    def rest(response: str, **row: Any) -> float: ...

    def ids(response: str, response_ids: list[int]) -> float: ...
    def texts(response: str, response_tokens: Any = ()) -> float: ...

    functions = (named, optional, column, rest, ids, texts)
    assert [recognise(one, "f").wants_tokens for one in functions] == [True, True, False, False, True, False]
    assert [recognise(one, "f").wants_token_texts for one in functions] == [False] * 5 + [True]


def test_what_a_signature_has() -> None:
    @batch
    async def one(response: list[str], answer: str, level: int = 0, *, more: str, **row: Any) -> list[float]: ...
    def other(completions: list[Any]) -> list[float]: ...

    texts = ("prompt", "response", "completion", "response_length", "response_ids", "response_tokens")
    assert recognise(one, "f") == Signature(
        "texts", True, True, texts, ("response", "answer", "more"), ("level",), True
    )
    given_to_trl = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
    assert recognise(other, "f") == Signature("trl", True, False, given_to_trl, ("completions",), (), False)


def test_a_call_of_one_sample_has_one() -> None:
    def plain(response: str) -> float: ...

    with pytest.raises(AssertionError, match="2 samples for a function of one"):
        arguments(plain, sample(), sample())


def test_trl() -> None:
    def trl(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]: ...
    def few(completions: list[Any], answer: list[str]) -> list[float]: ...

    assert recognise(trl, "f").wants_tokens
    assert not recognise(few, "f").wants_tokens
    assert arguments(trl, sample(row=ROW, tokens=(7, 8))) == {
        "prompts": ["What is 2 + 2?"],
        "completions": ["4"],
        "completion_ids": [[7, 8]],
        "answer": ["4"],
        "level": [3],
    }
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    chat = arguments(trl, sample(messages=messages))
    assert chat["prompts"] == [messages]
    assert chat["completions"] == [[{"role": "assistant", "content": "4"}]]


@pytest.mark.parametrize("row", [{"ground_truth": "4"}, {"reward_model": {"ground_truth": "4", "style": "rule"}}])
def test_verl(row: dict[str, Any]) -> None:
    def one(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float: ...
    def many(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any) -> list[float]: ...

    row = {"data_source": "sums", **row}
    expected = {"data_source": "sums", "solution_str": "4", "ground_truth": "4", "extra_info": None}
    assert arguments(one, sample(row=row)) == expected
    assert arguments(many, sample(row=row)) == {f"{name}s": [value] for name, value in expected.items()}
    assert not recognise(one, "f").missing(row)
    assert recognise(one, "f").missing(["answer"]) == ["data_source", "ground_truth"]
    assert recognise(one, "f").missing(["data_source"]) == ["ground_truth"]
    assert recognise(one, "f").missing(["extra_info", "ground_truth"]) == ["data_source"]
    assert recognise(many, "f").missing(["answer"]) == ["data_sources", "ground_truths"]


def test_the_right_answer_of_verl_is_its_own_column_first() -> None:
    def one(solution_str: str, ground_truth: str) -> float: ...

    own = {"ground_truth": "5", "reward_model": {"ground_truth": "4"}}
    assert arguments(one, sample(row=own))["ground_truth"] == "5"
    assert arguments(one, sample(row={"reward_model": "none"}))["ground_truth"] is None


def test_a_column_of_texts_is_not_one_of_verl() -> None:
    def one(response: str, ground_truth: str) -> float: ...

    assert recognise(one, "f").missing(["reward_model"]) == ["ground_truth"]
    assert recognise(one, "f").missing(["ground_truth"]) == []


def test_async_functions_and_objects() -> None:
    async def one(response: str) -> float: ...

    class Judge:
        async def __call__(self, response: str) -> float: ...

    class Rule:
        def __call__(self, response: str) -> float: ...

    assert recognise(one, "f").is_async
    assert recognise(Judge(), "f").is_async
    assert not recognise(Rule(), "f").is_async


def test_columns_are_read_by_parameters_without_a_default() -> None:
    columns = ["prompt", "answer", "hint", "reward_model", "data_source"]

    def texts(prompt: str, response: str, answer: str, hint: str = "") -> None: ...
    def lists(completions: list[Any], answer: list[str], **row: Any) -> None: ...
    def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> None: ...

    assert recognise(texts, "texts").columns_read(columns) == ["answer"]
    assert recognise(lists, "lists").columns_read(columns) == ["answer"]
    assert recognise(verl, "verl").columns_read(columns) == ["data_source", "reward_model"]
    assert recognise(verl, "verl").columns_read([*columns, "ground_truth"]) == ["data_source", "ground_truth"]


def test_parameters_without_a_column_are_found() -> None:
    def plain(prompt: str, response: str, answr: str, level: int = 1) -> float: ...

    assert recognise(plain, "f").missing(["answer"]) == ["answr"]


def none(question: str, answer: str) -> float: ...
def both(response: str, completions: str) -> float: ...
def positional(response: str, /) -> float: ...
def only_row(**row: Any) -> float: ...


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (none, "does not take the response"),
        (only_row, "does not take the response"),
        (both, "response and completions"),
        (positional, "remove the `/`"),
        (dict, "does not take the response|cannot be read"),
    ],
)
def test_what_is_no_form_is_refused(function: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        recognise(function, "f")


def test_what_is_said_of_a_form_that_is_none() -> None:
    forms = (
        "write it as (prompt, response, ...), in lists as (prompts, responses, ...), as TRL's (prompts, completions, "
        "**kwargs) or as verl's (data_source, solution_str, ground_truth, extra_info)"
    )

    def unreadable(response, completion=None): ...  # type: ignore[no-untyped-def]

    def no_response(question): ...  # type: ignore[no-untyped-def]

    def by_place(response, answer, /, level): ...  # type: ignore[no-untyped-def]

    for function, words in (
        (
            unreadable,
            "reward f has the parameters (response, completion=None), and takes response and completion, and a reward "
            f"takes one of them; {forms}",
        ),
        (no_response, f"reward f has the parameters (question), and does not take the response; {forms}"),
        (
            by_place,
            "f: arguments are given by name, and response, answer can have none; remove the `/` behind it",
        ),
    ):
        with pytest.raises(UserError) as caught:
            recognise(function, "f")
        assert str(caught.value) == words


NAMES = st.sampled_from(["prompt", "prompts", "answer", "level", "extra_info", "data_source", "completion_ids"])
RESPONSES = {"response", "completion", "responses", "completions", "solution_str", "solution_strs"}


@given(
    response=st.sampled_from(sorted(RESPONSES)),
    names=st.lists(NAMES, unique=True),
    defaults=st.data(),
    takes_rest=st.booleans(),
)
def test_every_signature_with_one_response_is_called_as_it_asks(
    response: str, names: list[str], defaults: st.DataObject, takes_rest: bool
) -> None:
    """Whatever the parameters: the function can be called with the arguments, and lists have one element a sample."""
    kinds = inspect.Parameter
    parameters = [
        kinds(name, kinds.KEYWORD_ONLY, default=None if defaults.draw(st.booleans()) else kinds.empty)
        for name in [response, *names]
    ] + ([kinds("row", kinds.VAR_KEYWORD)] if takes_rest else [])

    def function(**row: Any) -> float: ...

    asking_for(function)
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    found = recognise(function, "f")
    assert found.is_batch == (response in ("responses", "completions", "solution_strs"))
    samples = [sample(row=ROW)] * (3 if found.is_batch else 1)
    given_arguments = found.arguments(samples)
    function.__signature__.bind(**given_arguments)  # type: ignore[attr-defined]
    assert given_arguments[response] == (["4"] * 3 if found.is_batch else "4")
    if found.is_batch:
        assert {len(values) for values in given_arguments.values()} == {3}
    assert isinstance(found, Signature)
