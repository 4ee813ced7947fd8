"""Chats, examples and preference pairs: the tokens are the template's, and the loss lies on the assistant's."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from trl.data_utils import extract_prompt

from realhf.base.errors import UserError
from realhf.data import sort_task
from realhf.data.datasets import PreferenceDataset, PromptDataset, SFTDataset, common_text
from realhf.data.text_dataset import TextDataset
from realhf.data.tokenizer import TextTokenizer
from tests.unit.data.tokenizers_of_families import FORGETFUL_TEMPLATE, write_llama3, write_mistral, write_qwen


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture
def make(tmp_path: Path, qwen: Path):
    def make(kind: type[TextDataset], *rows: dict[str, Any], **options: Any) -> TextDataset:
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return kind(path=str(tmp_path / "data.jsonl"), **{"tokenizer": str(qwen)} | options)

    return make


def read(dataset: TextDataset, row: int = 0) -> dict[str, list[int]]:
    dataset.check()
    return dataset.open().row(row)


def texts(dataset: TextDataset, row: int = 0) -> dict[str, str]:
    """The texts of the keys that are tokens, with special tokens."""
    tokenizer = TextTokenizer(dataset.tokenizer)
    found = read(dataset, row)
    return {key: tokenizer.decode(found[key], skip_special=False) for key in dataset.token_keys}


def says(dataset: TextDataset) -> str:
    with pytest.raises(UserError) as error:
        dataset.check()
    assert "\n" not in str(error.value)
    return str(error.value)


def turns(*contents: str, system: str = "") -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(contents)
    front = [{"role": "system", "content": system}] if system else []
    return front + [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


DEFAULT = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"


def said(*contents: str) -> str:
    """The text of turns by Qwen's template."""
    roles = ["user", "assistant"] * len(contents)
    pairs = zip(roles, contents, strict=False)
    return DEFAULT + "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in pairs)


HEADER = "<|im_start|>assistant\n"


# --- Prompts.


def test_a_prompt_is_a_text_or_a_chat(make) -> None:
    assert texts(make(PromptDataset, {"prompt": "hi the"})) == {"prompt": "hi the"}
    assert texts(make(PromptDataset, {"prompt": turns("hi")})) == {"prompt": said("hi") + HEADER}
    assert texts(make(PromptDataset, {"question": "hi"}, as_chat=True)) == {"prompt": said("hi") + HEADER}
    with_system = said("hi").replace("You are a helpful assistant.", "Be brief.") + HEADER
    assert texts(make(PromptDataset, {"prompt": "hi"}, system="Be brief.")) == {"prompt": with_system}
    assert texts(make(PromptDataset, {"prompt": turns("hi")}, system="Be brief.")) == {"prompt": with_system}
    own = {"prompt": turns("hi", system="Be long.")}
    assert "Be long." in texts(make(PromptDataset, own, system="Be brief."))["prompt"]


def test_the_tokens_of_a_chat_are_those_of_transformers(make, tmp_path: Path) -> None:
    for folder in (write_llama3(tmp_path / "llama3"), write_mistral(tmp_path / "mistral")):
        chat = turns("the thing", "an answer", "and then")
        theirs = AutoTokenizer.from_pretrained(folder)
        expected = theirs.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False, date_string="26 Jul 2024"
        )
        assert read(make(PromptDataset, {"messages": chat}, tokenizer=str(folder))) == {"prompt": expected}


def test_of_a_whole_chat_the_last_answer_is_left_out(make) -> None:
    for chat in (turns("a", "b", "c", "d"), turns("a", "b", "c")):
        assert texts(make(PromptDataset, {"messages": chat})) == {"prompt": said("a", "b", "c") + HEADER}
    older = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert texts(make(PromptDataset, {"conversations": older})) == {"prompt": said("a") + HEADER}
    assert "ends with the assistant's turn" in says(make(PromptDataset, {"prompt": turns("a", "b")}))


def test_an_answer_beside_a_chat(make) -> None:
    dataset = make(PromptDataset, {"prompt": turns("a"), "solution": "42"}, with_answer=True)
    assert texts(dataset) == {"prompt": said("a") + HEADER, "answer": "42<|im_end|>"}


# --- Examples.


def test_an_example_is_a_prompt_and_its_response(make) -> None:
    dataset = make(SFTDataset, {"prompt": "a the", "completion": " b"})
    assert texts(dataset) == {"tokens": "a the b<|im_end|>"}
    tokens = read(dataset)
    assert dataset.open().tokenizer.decode(tokens["tokens"][: tokens["prompt_length"][0]]) == "a the"


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"messages": turns("a", "b", "c", "d")}, {}),
        ({"prompt": turns("a", "b", "c"), "completion": turns("c", "d")[1:]}, {}),
        ({"prompt": turns("a", "b", "c"), "answer": "d"}, {}),
        ({"x": turns("a", "b", "c"), "y": "d"}, {"prompt_field": "x", "response_field": "y"}),
        ({"prompt": "unused", "x": turns("a", "b", "c", "d")}, {"messages_field": "x"}),
    ],
)
def test_the_loss_lies_on_the_last_turn_of_a_chat(make, row, options) -> None:
    dataset = make(SFTDataset, row, **options)
    # The white space that the template writes behind the end token is nothing to learn.
    assert texts(dataset)["tokens"] == said("a", "b", "c", "d")[:-1]
    found = read(dataset)
    prompt = dataset.open().tokenizer.decode(found["tokens"][: found["prompt_length"][0]], skip_special=False)
    assert prompt == said("a", "b", "c") + HEADER


def masked(dataset: TextDataset) -> list[str]:
    """The pieces of the text that are in the loss."""
    found, tokenizer = read(dataset), TextTokenizer(dataset.tokenizer)
    assert len(found["loss_mask"]) == len(found["tokens"])
    assert not any(found["loss_mask"][: found["prompt_length"][0]])
    assert found["loss_mask"][found["prompt_length"][0]] == 1
    pieces: list[list[int]] = [[]]
    for token, in_loss in zip(found["tokens"], found["loss_mask"], strict=True):
        if in_loss:
            pieces[-1].append(token)
        elif pieces[-1]:
            pieces.append([])
    return [tokenizer.decode(piece, skip_special=False) for piece in pieces if piece]


def test_the_loss_on_all_turns(make, tmp_path: Path) -> None:
    row = {"messages": turns("a", "the b é", "c", "d")}
    expected = ["the b é<|im_end|>", "d<|im_end|>"]
    assert masked(make(SFTDataset, row, loss_on="all")) == expected
    forgetful = write_qwen(tmp_path / "forgetful", FORGETFUL_TEMPLATE)
    assert masked(make(SFTDataset, row, loss_on="all", tokenizer=str(forgetful))) == expected
    llama = write_llama3(tmp_path / "llama3")
    assert masked(make(SFTDataset, row, loss_on="all", tokenizer=str(llama))) == ["the b é<|eot_id|>", "d<|eot_id|>"]
    pair = make(SFTDataset, {"prompt": "a the", "completion": " b"}, loss_on="all")
    assert masked(pair) == [" b<|im_end|>"]
    assert set(read(pair)) == set(pair.keys)


def test_a_template_that_rewrites_earlier_turns(make, tmp_path: Path) -> None:
    """What it marks has places; without marks the last turn alone has."""
    thinking = turns("a", "b", "c", "d")
    thinking[1]["reasoning_content"] = thinking[3]["reasoning_content"] = "hm"
    forgetful = write_qwen(tmp_path / "forgetful", FORGETFUL_TEMPLATE)
    dataset = make(SFTDataset, {"messages": thinking}, loss_on="all", tokenizer=str(forgetful))
    assert masked(dataset) == ["b<|im_end|>", "<think>hm</think>d<|im_end|>"]
    unmarked = FORGETFUL_TEMPLATE.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    dataset = make(SFTDataset, {"messages": thinking}, loss_on="all", chat_template=unmarked)
    assert "changes earlier turns when later ones follow" in says(dataset)
    last = make(SFTDataset, {"messages": thinking}, chat_template=unmarked)
    assert texts(last)["tokens"].endswith("assistant\n<think>hm</think>d<|im_end|>")
    other = unmarked.replace("assistant\\n' }}{% endif", "assistant\\n<think>' }}{% endif")
    plain = make(SFTDataset, {"messages": turns("a", "b")}, chat_template=other)
    assert "begins the assistant's turn differently in a prompt and in a whole chat" in says(plain)


def test_a_token_across_the_border_is_divided_as_generation_would(make) -> None:
    """Generation begins behind the tokens of the prompt: `a` and `n`, though `an` is a token."""
    template = "{{ messages[0].content }}{% if messages[1] %}{{ messages[1].content }}{% endif %}"
    found = read(make(SFTDataset, {"prompt": "a", "completion": "n"}, chat_template=template, as_chat=True))
    whole = make(SFTDataset, {"prompt": "an", "completion": "x"}).open().tokenizer.encode("an")
    assert len(whole) == 1
    assert (len(found["tokens"]), found["prompt_length"]) == (3, [1])


def test_a_text_is_all_response(make, tmp_path: Path) -> None:
    dataset = make(SFTDataset, {"text": "the an"})
    assert texts(dataset) == {"tokens": "the an<|im_end|>"}
    assert read(dataset)["prompt_length"] == [1], "nothing predicts the first token"
    llama = write_llama3(tmp_path / "llama3")
    assert texts(make(SFTDataset, {"text": "the"}, tokenizer=str(llama)))["tokens"] == "<|begin_of_text|>the<|eot_id|>"


# --- Pairs.


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": turns("a"), "chosen": turns("", "b")[1:], "rejected": turns("", "c")[1:]},
        {"prompt": turns("a"), "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": turns("", "b")[1:], "rejected": turns("", "c")[1:]},
        {"chosen": turns("a", "b"), "rejected": turns("a", "c")},
        {"prompt": "a", "chosen": turns("a", "b"), "rejected": turns("a", "c")},
        {"prompt": "a", "chosen": "b", "rejected": "c", "as_chat": True},
    ],
)
def test_forms_of_pairs_that_are_chats(make, row) -> None:
    options = {"as_chat": True} if row.pop("as_chat", False) else {}
    dataset = make(PreferenceDataset, row, **options)
    assert texts(dataset) == {
        "prompt": said("a") + HEADER,
        "chosen": said("a", "b")[:-1],
        "rejected": said("a", "c")[:-1],
    }
    found = read(dataset)
    for side in ("chosen", "rejected"):
        assert found[side][: len(found["prompt"])] == found["prompt"]


def test_pairs_of_texts(make) -> None:
    explicit = make(PreferenceDataset, {"prompt": "the a", "chosen": " an", "rejected": " in"})
    assert texts(explicit) == {"prompt": "the a", "chosen": "the a an<|im_end|>", "rejected": "the a in<|im_end|>"}
    implicit = make(PreferenceDataset, {"chosen": "Q: the\nA: an", "rejected": "Q: the\nA: at"})
    assert texts(implicit)["prompt"] == "Q: the\nA: ", "no word is cut"
    assert texts(implicit)["chosen"] == "Q: the\nA: an<|im_end|>"
    assert "have no common beginning" in says(make(PreferenceDataset, {"chosen": "a", "rejected": "b"}))


def test_the_common_beginning_is_that_of_trl_up_to_a_word() -> None:
    chats = {"chosen": turns("a", "b", "c", "d"), "rejected": turns("a", "b", "c", "e")}
    assert extract_prompt(chats)["prompt"] == turns("a", "b", "c")
    for chosen, rejected in [("The sky is blue.", "The sky is green."), ("a b c", "a b d"), ("a b", "a b c")]:
        theirs = extract_prompt({"chosen": chosen, "rejected": rejected})["prompt"]
        ours = common_text(chosen, rejected)
        assert ours.rstrip() == theirs.rsplit(" ", 1)[0].rstrip() or ours.rstrip() == theirs.rstrip()
    assert common_text("The sky is blue", "The sky is black") == "The sky is "
    assert common_text("same words", "same words") == "same "
    assert common_text("same", "same") == ""


# --- What is wrong.


@pytest.mark.parametrize(
    ("kind", "row", "options", "expected"),
    [
        (
            PromptDataset,
            {"a": "b", "c": 1},
            {},
            "none of its columns (a, c) is known as the prompt (prompt, question, ",
        ),
        (PromptDataset, {"question": "b", "problem": "c"}, {}, "columns question and problem may all be the prompt"),
        (
            PromptDataset,
            {"prompt": "b"},
            {"prompt_field": "q"},
            "--prompt-field 'q' is none of its columns, which are prompt",
        ),
        (SFTDataset, {"prompt": "b"}, {}, "is known as the answer (answer, response, completion, output, solution)"),
        (
            PreferenceDataset,
            {"prompt": "b", "chosen": "c"},
            {},
            "known as the rejected (rejected); name the column with --rej",
        ),
        (PromptDataset, {"prompt": []}, {}, "line 1: field 'prompt' is [], not a list of messages; correct it"),
        (PromptDataset, {"prompt": {"a": 1}}, {}, "field 'prompt' is {'a': 1}, not a text of at least one character"),
        (PromptDataset, {"prompt": ["hi"]}, {}, "message 1 of field 'prompt' is 'hi', not an object"),
        (
            PromptDataset,
            {"prompt": [{"role": "user"}]},
            {},
            "message 1 of field 'prompt' has the content None, not a text",
        ),
        (PromptDataset, {"prompt": [{"content": "a"}]}, {}, "message 1 of field 'prompt' has the role None"),
        (PromptDataset, {"messages": turns(system="x")}, {}, "no user's turn (its roles: system)"),
        (SFTDataset, {"messages": turns("a")}, {}, "the last turn of the chat is not the assistant's"),
        (SFTDataset, {"messages": turns("a")}, {"loss_on": "all"}, "no turn of the assistant"),
        (PreferenceDataset, {"chosen": turns("a", "b"), "rejected": turns("c", "d")}, {}, "differ before an answer"),
        (
            PreferenceDataset,
            {"chosen": turns("", "b")[1:], "rejected": turns("", "d")[1:]},
            {},
            "have no prompt before",
        ),
        (
            PromptDataset,
            {"prompt": turns("a")},
            {"chat_template": "{{ raise_exception('no ' + 'way') }}"},
            "chat (no way)",
        ),
        (
            SFTDataset,
            {"messages": turns("a", "b")},
            {"chat_template": "{% generation %}{{ raise_exception('no ' + 'way') }}{% endgeneration %}"},
            "refuses the chat (no way); correct the chat, or give another template with --chat-template",
        ),
        (
            PromptDataset,
            {"prompt": turns("a")},
            {"chat_template": "{{ messages[9].role }}"},
            "refuses the chat (list obj",
        ),
    ],
)
def test_one_paragraph_says_what_is_wrong(make, kind, row, options, expected: str) -> None:
    assert expected in says(make(kind, row, **options))


def test_a_tokenizer_without_a_template(make, tmp_path: Path) -> None:
    sort_task.make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    text = says(make(PromptDataset, {"prompt": turns("a")}, tokenizer=str(tmp_path)))
    assert text.startswith(f"tokenizer {tmp_path}/tokenizer.json: it has no chat template")
    assert "give one with --chat-template" in text


def test_options_that_are_not_known(make) -> None:
    for options, expected in [
        ({"too_long": "cut"}, "too_long='cut' is not known; choose one of error, drop, truncate_left"),
        ({"max_tokens": 0}, "max_tokens 0 is not at least 1; give a number in that range"),
    ]:
        with pytest.raises(UserError, match=expected):
            make(SFTDataset, {"text": "a"}, **options)
    with pytest.raises(UserError, match="loss_on='first' is not known; choose one of last, all"):
        make(SFTDataset, {"text": "a"}, loss_on="first")
