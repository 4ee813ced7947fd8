"""Chat templates: Jinja in its sandbox, with the names that transformers gives to a template.

A template comes with a model, so it is code from outside: it runs in `ImmutableSandboxedEnvironment` and sees plain
JSON values alone.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from realhf.api.data_options import DEFAULT_DATE

Message = Mapping[str, Any]

# They enclose what a template marks as the assistant's ({% generation %}); no text of a chat may have them.
_BEGIN, _END = "\ue000\ue0fe\ue000", "\ue000\ue0ff\ue000"
# A message's reasoning has one of these names; templates read the first one, and `thinking`.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateError(Exception):
    """A template does not compile, or raises for a chat; the text is the template's."""


class ChatTemplate:
    """A chat template of a tokenizer.

    Args:
        source: the Jinja text.
        special_tokens: the tokenizer's special tokens by name (`bos_token`), which templates write.
        date: the date that `strftime_now` formats, as YYYY-MM-DD.

    Raises:
        TemplateError: the text is no template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], date: str = DEFAULT_DATE):
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._date = datetime.datetime.fromisoformat(date)
        self._plain = self._compile(_Generation)
        self._marked = self._compile(_MarkedGeneration)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The text of a chat; `add_generation_prompt` ends it with the header of an assistant's turn.

        Raises:
            TemplateError: the template raises.
        """
        return self._render(self._plain, messages, add_generation_prompt)

    def render_marked(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The text of a chat, and the parts that the template marks as the assistant's: (begin, end) in the text.

        Raises:
            TemplateError: the template raises, or the chat has the characters that are used as marks.
        """
        if _BEGIN in (text := json.dumps(_plain(messages), ensure_ascii=False)) or _END in text:
            raise TemplateError("the chat has private characters (U+E000, U+E0FE, U+E0FF) in a row")
        marked = self._render(self._marked, messages, add_generation_prompt=False)
        spans, pieces, length = [], [], 0
        for i, part in enumerate(marked.split(_BEGIN)):
            inside, has_end, outside = part.partition(_END) if i else ("", "", part)
            if has_end:
                spans.append((length, length + len(inside)))
            pieces += [inside, outside]
            length += len(inside) + len(outside)
        return "".join(pieces), spans

    def _render(self, template: jinja2.Template, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        chat = [_with_reasoning({k: v for k, v in _plain(message).items() if v is not None}) for message in messages]
        try:
            return template.render(
                messages=chat,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # a template can raise whatever an expression raises
            raise TemplateError(str(error) or type(error).__name__) from None

    def _compile(self, generation: type[jinja2.ext.Extension]) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = self._date.strftime
        environment.globals["dict"] = _make_dict
        try:
            return environment.from_string(self.source)
        except jinja2.exceptions.TemplateError as error:
            raise TemplateError(str(error)) from None


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %} of transformers, around the text of an assistant."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Macro) -> str:
        return str(caller())


class _MarkedGeneration(_Generation):
    def _inside(self, caller: Macro) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _make_dict(*args: Any, **items: Any) -> dict[Any, Any]:
    return dict(*args, **items)


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the escapes of Jinja's own filter, which are for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """JSON values as they are, and the text of any other value (a date in a parquet file)."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return {str(name): _plain(part) for name, part in value.items()}
        case list() | tuple():
            return [_plain(part) for part in value]
        case _:
            return str(value)
