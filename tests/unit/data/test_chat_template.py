"""What a template of a chat sees, and where it marks what the assistant has written."""

import datetime
from typing import Any

import pytest

from realhf.data.chat_template import ChatTemplate, TemplateError

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def render(source: str, messages: list[dict[str, Any]] = CHAT, **options: bool) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}, "2025-03-04").render(messages, **options)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages|length }}{{ messages[1].content }}", "2b"),
        ("{{ bos_token }}{{ eos_token }}", "<s>"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueFalse"),
        ("{{ strftime_now('%d.%m.%Y %H:%M') }}", "04.03.2025 00:00"),
        ("{{ dict(a=1) }}{{ dict([('b', 2)], c=3) }}", "{'a': 1}{'b': 2, 'c': 3}"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}", "assistant"),
        ("a\n  {% if 1 %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("x{% generation %}y{{ messages[0].content }}{% endgeneration %}z", "xyaz"),
        ("{{ {'b': 'é<', 'a': 1}|tojson }}", '{"b": "é<", "a": 1}'),
        ("{{ {'b': 'é<', 'a': 1}|tojson(ensure_ascii=True) }}", '{"b": "\\u00e9<", "a": 1}'),
        ("{{ {'b': 1, 'a': 2}|tojson(sort_keys=True) }}", '{"a": 2, "b": 1}'),
        ("{{ {'b': [1]}|tojson(indent=1) }}", '{\n "b": [\n  1\n ]\n}'),
        ("{{ {'b': 1, 'a': 2}|tojson(separators=(',', ':')) }}", '{"b":1,"a":2}'),
    ],
)
def test_what_a_template_has(source: str, text: str) -> None:
    assert render(source) == text
    assert ChatTemplate(source, {"bos_token": "<s>"}, "2025-03-04").render(CHAT) == text


def test_what_a_template_is_given() -> None:
    assert render("{{ add_generation_prompt }}", add_generation_prompt=True) == "True"
    assert ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}).render(CHAT) == "2024-07-26"
    assert ChatTemplate("source", {}).source == "source"


def test_values_are_those_of_json() -> None:
    """A date of a parquet file is its text; what is null is not there."""
    message = {
        "role": "user",
        "content": None,
        "date": datetime.date(2025, 1, 2),
        "values": (1, 2.5, True, None, {3: datetime.time(4, 5)}),
    }
    assert render("{{ messages[0]|tojson }}", [message]) == (
        '{"role": "user", "date": "2025-01-02", "values": [1, 2.5, true, null, {"3": "04:05:00"}]}'
    )
    assert render("{{ 'content' in messages[0] }}", [message]) == "False"


@pytest.mark.parametrize(
    ("names", "seen"),
    [
        ({"thinking": "x"}, "x x"),
        ({"reasoning": "x"}, "x x"),
        ({"reasoning_content": "x"}, "x x"),
        ({"reasoning": "x", "thinking": "y"}, "y y"),
        ({"thinking": "x", "reasoning_content": "y"}, "y x"),
        ({"thinking": "x", "reasoning_content": None}, "x x"),
        ({"thinking": "", "reasoning": "y"}, " "),
        ({}, "none none"),
    ],
)
def test_reasoning_has_the_names_that_templates_read(names: dict[str, Any], seen: str) -> None:
    source = "{{ messages[0].reasoning_content|d('none') }} {{ messages[0].thinking|d('none') }}"
    message = {"role": "assistant", "content": "b", **names}
    assert render(source, [message]) == seen
    assert "thinking" in names or "thinking" not in message, "the row stays as it is"


@pytest.mark.parametrize(
    ("source", "text", "places"),
    [
        ("x{{ messages[0].content }}", "xa", []),
        ("x{% generation %}{{ messages[1].content }}!{% endgeneration %}y", "xb!y", [(1, 3)]),
        ("{% generation %}{% endgeneration %}x", "x", [(0, 0)]),
        (
            "{% for m in messages %}-{% generation %}{{ m.content * 2 }}{% endgeneration %}{% endfor %}.",
            "-aa-bb.",
            [(1, 3), (4, 6)],
        ),
    ],
)
def test_the_places_that_a_template_marks(source: str, text: str, places: list[tuple[int, int]]) -> None:
    template = ChatTemplate(source, {})
    assert template.render_marked(CHAT) == (text, places)
    assert template.render(CHAT) == text


@pytest.mark.parametrize("mark", ["\ue000\ue0fe\ue000", "\ue000\ue0ff\ue000"])
def test_a_chat_with_the_characters_of_marks(mark: str) -> None:
    chat = [{"role": "user", "content": f"a{mark}b"}]
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render(chat) == f"a{mark}b"
    with pytest.raises(TemplateError, match=r"^the chat has private characters \(U\+E000, U\+E0FE, U\+E0FF\)"):
        template.render_marked(chat)
    near = [{"role": "user", "content": "\ue000\ue0fe\ue0ff\ue000"}]
    assert template.render_marked(near) == ("\ue000\ue0fe\ue0ff\ue000", [])


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('no') }}", "^no$"),
        ("{{ raise_exception('') }}", "^TemplateError$"),
        ("{{ messages[5].role }}", "has no element 5"),
        ("{{ messages.append(1) }}", "access to attribute .append. .* is unsafe"),
        ("{{ dict.pop(messages[0], 'content') }}", "has no attribute 'pop'"),
        ("{% for m in messages %}{% break %}{% endfor %}{{ 1 // 0 }}", "zero"),
    ],
)
def test_a_template_that_raises(source: str, says: str) -> None:
    for call in (ChatTemplate(source, {}).render, ChatTemplate(source, {}).render_marked):
        with pytest.raises(TemplateError, match=says):
            call(CHAT)


def test_a_text_that_is_no_template() -> None:
    with pytest.raises(TemplateError, match="Unexpected end of template"):
        ChatTemplate("{% generation %}", {})
