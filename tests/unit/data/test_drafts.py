"""Chats as drafts: what a template writes, what of it is prompt, and what is wrong with a chat."""

import re
from pathlib import Path
from typing import Any

import pytest

from realhf.data import sort_task
from realhf.data.chat_template import TemplateError
from realhf.data.drafts import Chat, ChatWriter, Draft, Response, text_of, turns_of
from realhf.data.tokenizer import TextTokenizer

# `u:a|` is a user's turn; an assistant's header is `a:`, and its turns end with `<eos>` and white space.
PLAIN = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if m.role == 'assistant' %}<eos> {% else %}|{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>"
    "{% endgeneration %} {% else %}{{ m.content }}|{% endif %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    sort_task.make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def writer(folder: Path, template: str, system: str = "") -> ChatWriter:
    return ChatWriter(TextTokenizer(folder, template), system)


def turns(*pairs: str) -> Chat:
    """`u:a` is a user's turn."""
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return [{"role": roles[pair[0]], "content": pair[2:]} for pair in pairs]


TWO = turns("u:b", "a:c", "u:d", "a:e")


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_the_last_turn_follows_all_others(template: str, folder: Path) -> None:
    assert writer(folder, template).last_turn(TWO) == Draft(
        prompt="u:b|a:c<eos> u:d|a:",
        responses=(Response(text="u:b|a:c<eos> u:d|a:e<eos> ", is_whole=True),),
        is_chat=True,
    )


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_all_turns_have_places_up_to_their_end_token(template: str, folder: Path) -> None:
    found = writer(folder, template).all_turns(TWO)
    [response] = found.responses
    assert response.spans is not None
    assert [response.text[a:b] for a, b in response.spans] == ["c<eos>", "e<eos>"]
    assert response.text == "u:b|a:c<eos> u:d|a:e<eos> "
    assert (found.prompt, found.is_chat, found.has_prompt, response.is_whole) == ("u:b|a:", True, True, True)


def test_a_turn_without_an_end_token_has_its_white_space(folder: Path) -> None:
    """Where a template writes none, and where a tokenizer has none, what it writes belongs to the turn."""
    no_end = PLAIN.replace("<eos> ", "* ")
    [response] = writer(folder, no_end).all_turns(TWO).responses
    assert response.spans is not None
    assert [response.text[a:b] for a, b in response.spans] == ["c* ", "e* "]
    endless = TextTokenizer(folder, no_end)
    endless.__dict__["end_tokens"] = ()
    [response] = ChatWriter(endless).all_turns(TWO).responses
    assert response.spans is not None
    assert [response.text[a:b] for a, b in response.spans] == ["c* ", "e* "]


REWRITTEN = "the chat template changes earlier turns when later ones follow, so the assistant's turns"


@pytest.mark.parametrize(
    "template",
    [
        # The number of turns; the number of turns behind the header; a header that is not the turn's; no turn at all.
        "{{ messages|length }}" + PLAIN,
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ messages|length }}{% endfor %}{% if "
        "add_generation_prompt %}a:{% endif %}",
        PLAIN.replace("%}a:{%", "%}x:{%"),
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
    ],
)
def test_turns_that_have_no_places(template: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(REWRITTEN)):
        writer(folder, template).all_turns(TWO)


def test_a_response_that_does_not_continue_the_prompt(folder: Path) -> None:
    other_header = writer(folder, PLAIN.replace("%}a:{%", "%}x:{%"))
    with pytest.raises(ValueError, match="begins the assistant's turn differently in a prompt and in a whole chat"):
        other_header.answers(turns("u:b"), [turns("a:c")])
    good = writer(folder, PLAIN).answers(turns("u:b"), [turns("a:c"), turns("a:d", "u:e", "a:f")])
    assert good == Draft(
        prompt="u:b|a:",
        responses=(
            Response(text="u:b|a:c<eos> ", is_whole=True),
            Response(text="u:b|a:d<eos> u:e|a:f<eos> ", is_whole=True),
        ),
        is_chat=True,
    )
    second = PLAIN.replace("{% for", "{% if messages|length == 4 %}!{% endif %}{% for")
    with pytest.raises(ValueError, match="in a prompt and in a whole chat"):
        writer(folder, second).answers(turns("u:b"), [turns("a:c"), turns("a:d", "u:e", "a:f")])


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_a_chat_in_which_nobody_asks(template: str, folder: Path) -> None:
    found = writer(folder, template)
    says = "the chat has no user's turn (its roles: {}), so there is no question to answer"
    chat = turns("s:b", "a:c")
    marked = "system, assistant" if template == MARKED else "system"
    both = "system, assistant"
    for call, roles in ((found.prompt, both), (found.all_turns, both), (found.last_turn, marked)):
        with pytest.raises(ValueError, match=f"^{re.escape(says.format(roles))}$"):
            call(chat)
    if template == PLAIN:
        with pytest.raises(ValueError, match=re.escape(says.format("none"))):
            found.last_turn(turns("a:c"))


def test_a_chat_without_a_response(folder: Path) -> None:
    found = writer(folder, PLAIN)
    with pytest.raises(ValueError, match=r"^the last turn of the chat is not the assistant's, so there is"):
        found.last_turn(TWO[:3])
    with pytest.raises(ValueError, match=r"^the chat has no turn of the assistant, so there is no response$"):
        found.all_turns(turns("u:b"))


def test_a_system_turn_goes_before_a_user_who_begins(folder: Path) -> None:
    brief, silent = writer(folder, PLAIN, "x"), writer(folder, PLAIN)
    [system] = turns("s:x")
    assert brief.of_text("b") == [system, *turns("u:b")]
    assert silent.of_text("b") == turns("u:b")
    assert brief.chat("f", turns("u:b")) == [system, *turns("u:b")]
    assert silent.chat("f", turns("u:b")) == turns("u:b")
    for first in ("s:y", "a:c"):
        assert brief.chat("f", turns(first, "u:b")) == turns(first, "u:b")


def test_whether_a_chat_was_written(folder: Path) -> None:
    found = writer(folder, PLAIN)
    found.of_text("b")
    assert not found.has_written
    assert found.prompt(turns("u:b")) == Draft(prompt="u:b|a:", is_chat=True)
    assert found.has_written


@pytest.mark.parametrize(
    "template", ["{{ messages[9].role }}", "{% generation %}{{ messages[9].role }}{% endgeneration %}"]
)
def test_a_template_that_refuses_a_chat(template: str, folder: Path) -> None:
    for call in (writer(folder, template).all_turns, writer(folder, template).last_turn):
        with pytest.raises(TemplateError, match=r"^list object"):
            call(TWO)


def test_characters_that_are_marks_are_refused_where_a_template_marks(folder: Path) -> None:
    chat = turns("u:\ue000\ue0fe\ue000", "a:c")
    with pytest.raises(TemplateError, match="the chat has private characters"):
        writer(folder, MARKED).last_turn(chat)
    alone = "{{ messages[0].content }}{% if messages|length > 1 %}{{ messages[1].content }}{% endif %}"
    assert writer(folder, alone).last_turn(chat).prompt == "\ue000\ue0fe\ue000"


# --- Fields.


def test_a_text_has_a_character() -> None:
    assert text_of("f", "x") == "x"
    for value, shown in (("", "''"), (7, "7"), (None, "None"), (["x"], "['x']")):
        with pytest.raises(ValueError, match=re.escape(f"field 'f' is {shown}, not a text of at least one character")):
            text_of("f", value)


@pytest.mark.parametrize(("letters", "shown"), [(58, "'" + "x" * 58 + "'"), (59, "'" + "x" * 58 + "…")])
def test_a_long_value_is_shown_in_part(letters: int, shown: str) -> None:
    with pytest.raises(ValueError, match=f"^field 'f' is {shown}, not a list of messages$"):
        turns_of("f", "x" * letters)


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ({"from": "human", "value": "b"}, {"role": "user", "content": "b"}),
        ({"from": "gpt", "value": "b"}, {"role": "assistant", "content": "b"}),
        ({"from": "bing", "value": "b"}, {"role": "assistant", "content": "b"}),
        ({"from": "chatgpt", "value": "b"}, {"role": "assistant", "content": "b"}),
        ({"from": "system", "value": "b"}, {"role": "system", "content": "b"}),
        ({"role": "user", "content": "", "name": "n"}, {"role": "user", "content": "", "name": "n"}),
        ({"role": "user", "content": [{"text": "b"}]}, {"role": "user", "content": [{"text": "b"}]}),
        (
            {"role": "user", "content": "b", "from": "gpt", "value": "c"},
            {"role": "user", "content": "b", "from": "gpt", "value": "c"},
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [{}]},
            {"role": "assistant", "content": None, "tool_calls": [{}]},
        ),
    ],
)
def test_turns_in_both_forms(turn: dict[str, Any], expected: dict[str, Any]) -> None:
    found = turns_of("f", [turn])
    assert found == [expected]
    assert found[0] is not turn


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ("hi", "message 2 of field 'f' is 'hi', not an object {\"role\": ..., \"content\": ...}"),
        (
            {"from": "human", "content": "b"},
            "message 2 of field 'f' has the role None, not a text (user, assistant, sy",
        ),
        ({"value": "b"}, "message 2 of field 'f' has the role None"),
        ({"from": ["human"], "value": "b"}, "message 2 of field 'f' has the role ['human']"),
        ({"role": "", "content": "b"}, "message 2 of field 'f' has the role ''"),
        ({"role": "user", "content": None}, "message 2 of field 'f' has the content None, not a text"),
        ({"role": "user", "content": None, "tool_calls": []}, "message 2 of field 'f' has the content None, not"),
        ({"role": "user", "content": 7, "tool_calls": [{}]}, "message 2 of field 'f' has the content 7, not a text"),
    ],
)
def test_turns_that_are_none(turn: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        turns_of("f", [{"role": "user", "content": "b"}, turn])


@pytest.mark.parametrize("value", [[], None, {"role": "user", "content": "b"}])
def test_a_field_without_messages(value: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"field 'f' is {value!r}, not a list of messages")):
        turns_of("f", value)
