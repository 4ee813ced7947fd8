"""The kinds of data sets by hand: which columns they read, the draft of a row, and the keys of its tokens."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from realhf.base.errors import UserError
from realhf.data import sort_task
from realhf.data.datasets import PreferenceDataset, PromptDataset, SFTDataset, common_text
from realhf.data.drafts import ChatWriter, Draft, Response
from realhf.data.encoding import EncodedRow
from realhf.data.fields import Columns
from realhf.data.text_dataset import TextDataset
from realhf.data.tokenizer import TextTokenizer
from tests.unit.data.test_drafts import PLAIN, turns

PATHS = {"path": "a.jsonl", "tokenizer": "t"}
FIELDS = {name: f"{name}_field" for name in ("prompt", "messages", "answer", "response", "text", "chosen", "rejected")}


def roles(dataset: TextDataset, *columns: str) -> dict[str, str]:
    return dataset.roles(Columns("a.jsonl", columns, dataset.field_options()))


@pytest.mark.parametrize(
    ("columns", "options", "found"),
    [
        (["prompt", "messages"], {}, {"prompt": "prompt"}),
        (["messages", "level"], {}, {"messages": "messages"}),
        (["conversations", "answer"], {"with_answer": True}, {"messages": "conversations", "answer": "answer"}),
        (["prompt", "x"], {"messages_field": "x"}, {"messages": "x"}),
        (["x", "y"], {"messages_field": "x", "prompt_field": "y"}, {"prompt": "y"}),
        (["x", "messages"], {"prompt_field": "x"}, {"prompt": "x"}),
        (["question", "solution"], {"with_answer": True}, {"prompt": "question", "answer": "solution"}),
        (["question", "x"], {"with_answer": True, "answer_field": "x"}, {"prompt": "question", "answer": "x"}),
        (["question", "solution"], {}, {"prompt": "question"}),
    ],
)
def test_the_columns_of_prompts(columns: list[str], options: dict[str, Any], found: dict[str, str]) -> None:
    assert roles(PromptDataset(**PATHS, **options), *columns) == found


@pytest.mark.parametrize(
    ("columns", "options", "found"),
    [
        (["prompt", "answer", "messages", "text"], {}, {"prompt": "prompt", "answer": "answer"}),
        (["question", "output"], {}, {"prompt": "question", "answer": "output"}),
        (["messages", "text"], {}, {"messages": "messages"}),
        (["messages", "prompt"], {}, {"messages": "messages"}),
        (["messages", "answer"], {}, {"messages": "messages"}),
        (["text", "prompt"], {}, {"text": "text"}),
        (["text", "answer"], {}, {"text": "text"}),
        (["prompt", "answer", "x"], {"messages_field": "x"}, {"messages": "x"}),
        (["prompt", "answer", "x"], {"text_field": "x"}, {"text": "x"}),
        (["x", "y"], {"text_field": "x", "messages_field": "y"}, {"messages": "y"}),
        (["messages", "x", "answer"], {"prompt_field": "x"}, {"prompt": "x", "answer": "answer"}),
        (["messages", "x", "prompt"], {"response_field": "x"}, {"prompt": "prompt", "answer": "x"}),
    ],
)
def test_the_columns_of_examples(columns: list[str], options: dict[str, Any], found: dict[str, str]) -> None:
    assert roles(SFTDataset(**PATHS, **options), *columns) == found


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (["messages", "prompt"], {"prompt_field": "prompt"}, "is known as the answer"),
        (["messages", "answer"], {"response_field": "answer"}, "is known as the prompt"),
        (["prompt"], {}, "the answer (answer, response, completion, output, solution); name the column with"),
        (["level"], {}, "none of its columns (level) is known as the prompt"),
    ],
)  # fmt: skip
def test_examples_without_a_column(columns: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        roles(SFTDataset(**PATHS, **options), *columns)


def test_the_columns_of_pairs() -> None:
    sides = {"chosen": "chosen", "rejected": "rejected"}
    assert roles(PreferenceDataset(**PATHS), "rejected", "chosen") == sides
    assert roles(PreferenceDataset(**PATHS), "rejected", "chosen", "question") == {"prompt": "question", **sides}
    named = PreferenceDataset(**PATHS, prompt_field="c", chosen_field="a", rejected_field="b")
    assert roles(named, "a", "b", "c", "prompt") == {"prompt": "c", "chosen": "a", "rejected": "b"}


# --- Drafts. A user's turn is written `u:b|`, an assistant's `a:c<eos> `.


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    sort_task.make_tokenizer().save(str(folder / "tokenizer.json"))
    return TextTokenizer(folder, PLAIN)


def draft(dataset: TextDataset, tokenizer: TextTokenizer, row: Mapping[str, Any], **columns: str) -> Draft:
    """`columns`: by role, where the column has another name."""
    named = {role: columns.get(role, role) for role in row}
    record = {named[role]: value for role, value in row.items()}
    return dataset.draft(record, named, ChatWriter(tokenizer, dataset.system))


def wholes(prompt: str, *texts: str) -> Draft:
    told = tuple(Response(text=text, is_whole=True) for text in texts)
    return Draft(prompt=prompt, responses=told, is_chat=True)


@pytest.mark.parametrize(
    ("row", "options", "prompt", "is_chat"),
    [
        ({"prompt": "b"}, {}, "b", False),
        ({"prompt": "b"}, {"as_chat": True}, "u:b|a:", True),
        ({"prompt": "b"}, {"system": "x"}, "s:x|u:b|a:", True),
        ({"prompt": turns("u:b")}, {}, "u:b|a:", True),
        ({"messages": turns("u:b", "a:c", "u:d")}, {}, "u:b|a:c<eos> u:d|a:", True),
        ({"messages": turns("u:b", "a:c", "u:d", "a:e")}, {"system": "x"}, "s:x|u:b|a:c<eos> u:d|a:", True),
    ],
)
def test_the_draft_of_a_prompt(
    row: dict[str, Any], options: dict[str, Any], prompt: str, is_chat: bool, tokenizer: TextTokenizer
) -> None:
    assert draft(PromptDataset(**PATHS, **options), tokenizer, row) == Draft(prompt=prompt, is_chat=is_chat)
    with_answer = PromptDataset(**PATHS, with_answer=True, **options)
    assert draft(with_answer, tokenizer, {**row, "answer": "y"}) == Draft(
        prompt=prompt, responses=(Response(text="y"),), is_chat=is_chat
    )
    assert draft(PromptDataset(**PATHS, **options), tokenizer, {**row, "answer": "y"}).responses == ()


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        ({"text": "b"}, {}, Draft(prompt="", responses=(Response(text="b"),), has_prompt=False)),
        ({"prompt": "b", "answer": "c"}, {}, Draft(prompt="b", responses=(Response(text="c"),))),
        ({"prompt": "b", "answer": "c"}, {"as_chat": True}, wholes("u:b|a:", "u:b|a:c<eos> ")),
        ({"prompt": "b", "answer": "c"}, {"system": "x"}, wholes("s:x|u:b|a:", "s:x|u:b|a:c<eos> ")),
        ({"prompt": turns("u:b"), "answer": "c"}, {}, wholes("u:b|a:", "u:b|a:c<eos> ")),
        ({"prompt": "b", "answer": turns("a:c")}, {}, wholes("u:b|a:", "u:b|a:c<eos> ")),
        ({"messages": turns("u:b", "a:c")}, {}, wholes("u:b|a:", "u:b|a:c<eos> ")),
        ({"messages": turns("u:b", "a:c")}, {"system": "x"}, wholes("s:x|u:b|a:", "s:x|u:b|a:c<eos> ")),
    ],
)
def test_the_draft_of_an_example(
    row: dict[str, Any], options: dict[str, Any], expected: Draft, tokenizer: TextTokenizer
) -> None:
    assert draft(SFTDataset(**PATHS, **options), tokenizer, row) == expected
    spans = draft(SFTDataset(**PATHS, **options, loss_on="all"), tokenizer, row).responses[0].spans
    assert (spans is not None) == expected.is_chat


ANSWERS = wholes("u:b|a:", "u:b|a:c<eos> ", "u:b|a:d<eos> ")


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        (("b", "c", "d"), {}, Draft(prompt="b", responses=(Response(text="c"), Response(text="d")))),
        (("b", "c", "d"), {"as_chat": True}, ANSWERS),
        (("b", "c", "d"), {"system": "x"}, wholes("s:x|u:b|a:", "s:x|u:b|a:c<eos> ", "s:x|u:b|a:d<eos> ")),
        ((None, "b cd", "b ce"), {}, Draft(prompt="b ", responses=(Response(text="cd"), Response(text="ce")))),
        ((None, "b c", "b de"), {}, Draft(prompt="b ", responses=(Response(text="c"), Response(text="de")))),
        ((turns("u:b"), "c", "d"), {}, ANSWERS),
        (("b", turns("a:c"), turns("a:d")), {}, ANSWERS),
        (("b", turns("a:c"), "d"), {}, ANSWERS),
        ((None, turns("u:b", "a:c"), turns("u:b", "a:d")), {}, ANSWERS),
        (("z", turns("u:b", "a:c"), turns("u:b", "a:d")), {}, ANSWERS),
        ((None, turns("u:b", "a:c"), turns("u:b", "a:c")), {}, wholes("u:b|a:", *["u:b|a:c<eos> "] * 2)),
        (
            (None, turns("u:b", "a:c"), turns("u:b", "a:c", "u:d", "a:e")),
            {"system": "x"},
            wholes("s:x|u:b|a:", "s:x|u:b|a:c<eos> ", "s:x|u:b|a:c<eos> u:d|a:e<eos> "),
        ),
        (
            (None, turns("u:b", "a:c", "u:d", "a:e"), turns("u:b", "a:c", "u:d", "a:f")),
            {},
            wholes("u:b|a:c<eos> u:d|a:", "u:b|a:c<eos> u:d|a:e<eos> ", "u:b|a:c<eos> u:d|a:f<eos> "),
        ),
    ],
)
def test_the_draft_of_a_pair(
    row: tuple[Any, Any, Any], options: dict[str, Any], expected: Draft, tokenizer: TextTokenizer
) -> None:
    named = dict(zip(("prompt", "chosen", "rejected"), row, strict=True))
    if row[0] is None:
        del named["prompt"]
    found = draft(PreferenceDataset(**PATHS, **options), tokenizer, named, prompt="p", chosen="x", rejected="y")
    assert found == expected


NO_PROMPT = "its answers have no prompt before them; name the column of the prompt with --prompt-field"


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        (
            PromptDataset,
            {"prompt": turns("u:b", "a:c")},
            "the chat 'p' ends with the assistant's turn, and a prompt ends",
        ),
        (PromptDataset, {"prompt": turns()}, "field 'p' is [], not a list of messages"),
        (PromptDataset, {"prompt": 7}, "field 'p' is 7, not a text"),
        (SFTDataset, {"text": ""}, "field 'text' is '', not a text"),
        (SFTDataset, {"prompt": "", "answer": "c"}, "field 'p' is '', not a text"),
        (SFTDataset, {"prompt": "b", "answer": ""}, "field 'answer' is '', not a text"),
        (SFTDataset, {"prompt": 7, "answer": "c"}, "field 'p' is 7, not a text"),
        (SFTDataset, {"prompt": turns("u:b"), "answer": 7}, "field 'answer' is 7, not a text"),
        (SFTDataset, {"prompt": turns("u:b"), "answer": []}, "field 'answer' is [], not a list of messages"),
        (PreferenceDataset, {"chosen": turns("a:c"), "rejected": turns("a:d")}, NO_PROMPT),
        (PreferenceDataset, {"chosen": turns("u:b", "a:c"), "rejected": turns("a:d")}, NO_PROMPT),
        (PreferenceDataset, {"chosen": turns("a:c"), "rejected": turns("u:b", "a:d")}, NO_PROMPT),
        (
            PreferenceDataset,
            {"chosen": turns("u:b", "a:c"), "rejected": turns("u:d", "a:c")},
            "the chats 'x' and 'y' differ before an answer of the assistant; make them equal up to there",
        ),
        (
            PreferenceDataset,
            {"chosen": turns("u:b", "a:c", "u:d", "a:e"), "rejected": turns("u:b", "a:c", "u:f", "a:e")},
            "the chats 'x' and 'y' differ before an answer",
        ),
        (PreferenceDataset, {"prompt": "b", "chosen": "", "rejected": "d"}, "field 'x' is ''"),
        (PreferenceDataset, {"prompt": "b", "chosen": "c", "rejected": 7}, "field 'y' is 7"),
        (PreferenceDataset, {"prompt": 7, "chosen": "c", "rejected": "d"}, "field 'p' is 7"),
        (PreferenceDataset, {"prompt": 7, "chosen": turns("a:c"), "rejected": turns("a:d")}, "field 'p' is 7"),
        (
            PreferenceDataset,
            {"chosen": "bc", "rejected": "bd"},
            "the texts 'x' and 'y' have no common beginning, which would be the prompt; name the column of the prompt",
        ),
    ],
)
def test_a_row_that_is_none(
    kind: type[TextDataset], row: dict[str, Any], message: str, tokenizer: TextTokenizer
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        draft(kind(**PATHS), tokenizer, row, prompt="p", chosen="x", rejected="y")


@pytest.mark.parametrize(
    ("chosen", "rejected", "common"),
    [
        ("a b", "a c", "a "),
        ("a\nb", "a\nc", "a\n"),
        ("a  b", "a  c", "a  "),
        ("a b", "a bc", "a "),
        ("a b ", "a b c", "a "),
        ("a b c", "a b ", "a "),
        ("ab c", "ad c", ""),
        (" b", " c", " "),
        ("a", "a", ""),
        (" ", "  ", ""),
        ("x", "", ""),
    ],
)
def test_the_words_that_two_texts_begin_with(chosen: str, rejected: str, common: str) -> None:
    assert common_text(chosen, rejected) == common_text(rejected, chosen) == common


# --- Keys.


def test_the_keys_of_every_kind() -> None:
    assert PromptDataset(**PATHS).keys == PromptDataset(**PATHS).token_keys == ("prompt",)
    with_answer = PromptDataset(**PATHS, with_answer=True)
    assert with_answer.keys == with_answer.token_keys == ("prompt", "answer")
    last, everything = SFTDataset(**PATHS), SFTDataset(**PATHS, loss_on="all")
    assert last.keys == ("tokens", "prompt_length")
    assert everything.keys == ("tokens", "prompt_length", "loss_mask")
    assert last.token_keys == everything.token_keys == ("tokens",)
    assert PreferenceDataset(**PATHS).keys == ("prompt", "chosen", "rejected")
    kinds = (PromptDataset, SFTDataset, PreferenceDataset)
    assert [kind.joins for kind in kinds] == [False, True, True]


def test_the_columns_of_a_row() -> None:
    row = EncodedRow([1, 2], [[3, 4, 5], [6]])
    assert PromptDataset(**PATHS).columns(row) == {"prompt": [1, 2]}
    assert PromptDataset(**PATHS, with_answer=True).columns(row) == {"prompt": [1, 2], "answer": [3, 4, 5]}
    example = {"tokens": [1, 2, 3, 4, 5], "prompt_length": [2]}
    assert SFTDataset(**PATHS).columns(row) == example
    everything = SFTDataset(**PATHS, loss_on="all")
    assert everything.columns(row) == {**example, "loss_mask": [0, 0, 1, 1, 1]}
    row.in_loss = [1, 0, 1]
    assert everything.columns(row) == {**example, "loss_mask": [0, 0, 1, 0, 1]}
    assert PreferenceDataset(**PATHS).columns(row) == {
        "prompt": [1, 2],
        "chosen": [1, 2, 3, 4, 5],
        "rejected": [1, 2, 6],
    }
