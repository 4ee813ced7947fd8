"""Rows as texts, before they become tokens: chats go through the tokenizer's template here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realhf.data.chat_template import ChatTemplate
from realhf.data.tokenizer import TextTokenizer

Chat = list[dict[str, Any]]
# The roles of the older form of chats, {"from": "human", "value": "..."}.
_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}


@dataclass(frozen=True, kw_only=True)
class Response:
    """The text that follows a prompt.

    is_whole: the text begins with the prompt, as a template writes both; else it is the response alone.
    spans: the characters (begin, end) of a whole text that are in the loss; None: all behind the prompt.
    """

    text: str
    is_whole: bool = False
    spans: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A row: a prompt and its responses.

    is_chat: a template wrote the prompt, with its special tokens.
    has_prompt: False for a text that is all response; `prompt` is then empty.
    """

    prompt: str
    responses: tuple[Response, ...] = ()
    is_chat: bool = False
    has_prompt: bool = True


class ChatWriter:
    """Writes chats with a tokenizer's template. What writes one also raises TemplateError where the template does.

    Args:
        system: the content of a system turn in front of chats that have none; "" adds none.
    """

    def __init__(self, tokenizer: TextTokenizer, system: str = ""):
        self._tokenizer, self._system = tokenizer, system
        self.has_written = False

    @property
    def _template(self) -> ChatTemplate:
        self.has_written = True
        return self._tokenizer.template

    def chat(self, field: str, value: Any) -> Chat:
        """The turns of a field, checked, with the system's in front. Raises ValueError naming the fault."""
        chat = turns_of(field, value)
        return [*self._front(chat[0]["role"]), *chat]

    def of_text(self, text: str) -> Chat:
        """A chat of one user's turn."""
        return [*self._front("user"), {"role": "user", "content": text}]

    def _front(self, first_role: str) -> Chat:
        has_room = self._system and first_role == "user"
        return [{"role": "system", "content": self._system}] if has_room else []

    def prompt(self, chat: Chat) -> Draft:
        """The prompt of an assistant's turn that follows a chat.

        Raises:
            ValueError: the chat has no user's turn.
        """
        return Draft(prompt=self._prompt_text(chat), is_chat=True)

    def answers(self, chat: Chat, continuations: Sequence[Chat]) -> Draft:
        """A chat, and turns of the assistant that continue it, each a response.

        Raises:
            ValueError: as `prompt`; or the text of a continuation does not begin with the prompt's.
        """
        prompt = self._prompt_text(chat)
        wholes = [self._template.render([*chat, *turns]) for turns in continuations]
        if not all(whole.startswith(prompt) for whole in wholes):
            raise ValueError(
                "the chat template begins the assistant's turn differently in a prompt and in a whole chat, so prompt "
                "and response cannot be separated; give a --chat-template that begins both alike"
            )
        return Draft(prompt=prompt, responses=tuple(Response(text=w, is_whole=True) for w in wholes), is_chat=True)

    def last_turn(self, chat: Chat) -> Draft:
        """A chat whose last turn is the response. Raises ValueError as `answers`, or the last turn is not the
        assistant's."""
        if chat[-1]["role"] != "assistant":
            raise ValueError("the last turn of the chat is not the assistant's, so there is no response")
        marked, spans = self._marked(chat)
        if not spans:
            return self.answers(chat[:-1], [chat[-1:]])
        self._check_user(chat)
        return Draft(prompt=marked[: spans[-1][0]], responses=(Response(text=marked, is_whole=True),), is_chat=True)

    def all_turns(self, chat: Chat) -> Draft:
        """A chat whose assistant's turns are all in the loss; the text before the first of them is the prompt.

        The template marks them ({% generation %}), or the text of the first turns begins the text of all.

        Raises:
            ValueError: there is no such turn, or their places cannot be found.
        """
        places = [i for i, turn in enumerate(chat) if turn["role"] == "assistant"]
        if not places:
            raise ValueError("the chat has no turn of the assistant, so there is no response")
        self._check_user(chat)
        whole, spans = self._marked(chat)
        if not spans:
            spans = [self._span(chat, place, whole) for place in places]
        response = Response(text=whole, is_whole=True, spans=tuple(spans))
        return Draft(prompt=whole[: spans[0][0]], responses=(response,), is_chat=True)

    def _span(self, chat: Chat, place: int, whole: str) -> tuple[int, int]:
        """The characters of one turn of the assistant, its end token included."""
        before = self._template.render(chat[:place], add_generation_prompt=True)
        behind = self._template.render(chat[: place + 1])
        if not (whole.startswith(before) and whole.startswith(behind) and len(before) < len(behind)):
            raise ValueError(
                "the chat template changes earlier turns when later ones follow, so the assistant's turns cannot be "
                "located; set --loss-on last, or give a --chat-template that marks them ({% generation %})"
            )
        turn = behind[len(before) :].rstrip()
        ends = tuple(self._tokenizer.decode([token], skip_special=False) for token in self._tokenizer.end_tokens)
        return len(before), len(before) + len(turn) if turn.endswith(ends) else len(behind)

    def _prompt_text(self, chat: Chat) -> str:
        self._check_user(chat)
        return self._template.render(chat, add_generation_prompt=True)

    def _check_user(self, chat: Chat) -> None:
        if not any(turn["role"] == "user" for turn in chat):
            roles = ", ".join(turn["role"] for turn in chat) or "none"
            raise ValueError(f"the chat has no user's turn (its roles: {roles}), so there is no question to answer")

    def _marked(self, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        if "generation" not in self._template.source:
            return self._template.render(chat), []
        return self._template.render_marked(chat)


def text_of(field: str, value: Any) -> str:
    """A text that is not empty. Raises ValueError."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"field {field!r} is {_shown(value)}, not a text of at least one character")
    return value


def turns_of(field: str, value: Any) -> Chat:
    """The turns of a field, checked. Raises ValueError naming the fault."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"field {field!r} is {_shown(value)}, not a list of messages")
    return [_turn(field, i, turn) for i, turn in enumerate(value, 1)]


def _turn(field: str, number: int, turn: Any) -> dict[str, Any]:
    where = f"message {number} of field {field!r}"
    if not isinstance(turn, Mapping):
        raise ValueError(f'{where} is {_shown(turn)}, not an object {{"role": ..., "content": ...}}')
    if "from" in turn and "value" in turn and "role" not in turn:
        speaker = turn["from"]
        turn = {"role": _ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker, "content": turn["value"]}
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where} has the role {_shown(role)}, not a text (user, assistant, system)")
    has_other = bool(turn.get("tool_calls"))
    if not isinstance(content, str | list) and not (content is None and has_other):
        raise ValueError(f"{where} has the content {_shown(content)}, not a text")
    return dict(turn)


def _shown(value: Any, length: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= length else f"{text[: length - 1]}…"
