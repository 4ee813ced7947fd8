"""Which column has which role: by an option, or by its name."""

import re

import pytest

from realhf.base.errors import UserError
from realhf.data.fields import Columns


@pytest.mark.parametrize(
    ("columns", "given", "found"),
    [
        (["prompt", "question"], "", "prompt"),
        (["problem", "level"], "", "problem"),
        (["level"], "", None),
        (["question", "problem", "level"], "level", "level"),
        ([], "", None),
    ],
    ids=["the first name", "another name", "none", "an option", "no columns"],
)
def test_the_column_of_a_role(columns: list[str], given: str, found: str | None) -> None:
    assert Columns("a.jsonl", columns, {"prompt_field": given}).find("prompt", "prompt_field") == found
    if found is not None:
        assert Columns("a.jsonl", columns, {"prompt_field": given}).need("prompt", "prompt_field") == found


def test_several_names_of_a_role_are_a_question() -> None:
    columns = Columns("a.jsonl", ["query", "question", "level"], {})
    message = "data set a.jsonl: its columns question and query may all be the prompt; name one with --prompt-field"
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        columns.find("prompt", "prompt_field")


@pytest.mark.parametrize(("names", "shown"), [(["a", "b"], "a, b"), ([], "none")])
def test_a_role_without_a_column_is_named_with_all_columns(names: list[str], shown: str) -> None:
    message = (
        f"data set a.jsonl: none of its columns ({shown}) is known as the messages (messages, conversations, "
        "conversation); name the column with --messages-field, or add one"
    )
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        Columns("a.jsonl", names, {}).need("messages", "messages_field")


def test_an_option_that_names_no_column() -> None:
    message = "data set a.jsonl: --x-field 'c' is none of its columns, which are a, b; name one of these"
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        Columns("a.jsonl", ["a", "b"], {"y_field": "", "z_field": "b", "x_field": "c"})


def test_what_is_given_and_what_is_absent() -> None:
    columns = Columns("a.jsonl", ["question", "output"], {"prompt_field": "output", "text_field": ""})
    fields = ["prompt_field", "text_field", "answer_field"]
    assert [columns.is_given(option) for option in fields] == [True, False, False]
    assert [columns.is_absent(role) for role in ("prompt", "answer", "text")] == [False, False, True]
