"""The kinds of data sets: prompts, examples, preferences. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from realhf.api.data_options import ExampleOptions, PairOptions
from realhf.data.drafts import Chat, ChatWriter, Draft, Response, text_of, turns_of
from realhf.data.encoding import EncodedRow
from realhf.data.fields import Columns
from realhf.data.files.rows import Record
from realhf.data.text_dataset import TextDataset
from realhf.data.tokenizer import Tokens


@dataclass(frozen=True, kw_only=True)
class PromptDataset(TextDataset):
    """Prompts: `prompt`; with `with_answer` also `answer`, a text and the end token.

    A prompt is a text or a chat. In a whole chat (`messages_field`) the assistant's last turn is left out. Reward
    functions can read the other columns (`DatasetRows.records`).
    """

    joins: ClassVar[bool] = False

    with_answer: bool = False
    answer_field: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        return ("prompt", "answer") if self.with_answer else ("prompt",)

    def roles(self, columns: Columns) -> dict[str, str]:
        answer = {"answer": columns.need("answer", "answer_field")} if self.with_answer else {}
        if not columns.is_given("prompt_field") and (columns.is_given("messages_field") or columns.is_absent("prompt")):
            messages = columns.find("messages", "messages_field")
            if messages is not None:
                return {"messages": messages, **answer}
        return {"prompt": columns.need("prompt", "prompt_field"), **answer}

    def draft(self, record: Record, roles: Mapping[str, str], writer: ChatWriter) -> Draft:
        if "messages" in roles:
            chat = writer.chat(roles["messages"], record[roles["messages"]])
            draft = writer.prompt(chat[:-1] if chat[-1]["role"] == "assistant" else chat)
        else:
            column, value = roles["prompt"], record[roles["prompt"]]
            as_chat = isinstance(value, list) or self.as_chat or self.system
            draft = writer.prompt(_chat_of(value, column, writer)) if as_chat else Draft(prompt=text_of(column, value))
        if not self.with_answer:
            return draft
        answer = Response(text=text_of(roles["answer"], record[roles["answer"]]))
        return Draft(prompt=draft.prompt, responses=(answer,), is_chat=draft.is_chat)

    def columns(self, row: EncodedRow) -> dict[str, Tokens]:
        return {"prompt": row.prompt} | ({"answer": row.responses[0]} if self.with_answer else {})


@dataclass(frozen=True, kw_only=True)
class SFTDataset(ExampleOptions, TextDataset):
    """Examples: `tokens` (prompt, response, end token) and `prompt_length` [1]; with loss_on="all" also `loss_mask`
    [tokens], 1 for the tokens of the assistant's turns.

    A row is a prompt and a response (texts, or lists of messages), a chat, or a text that is all response.
    """

    @property
    def keys(self) -> tuple[str, ...]:
        return ("tokens", "prompt_length", *(["loss_mask"] if self.loss_on == "all" else []))

    @property
    def token_keys(self) -> tuple[str, ...]:
        return ("tokens",)

    def roles(self, columns: Columns) -> dict[str, str]:
        for role in ("messages", "text"):
            if columns.is_given(f"{role}_field"):
                return {role: columns.need(role, f"{role}_field")}
        has_pair = not columns.is_absent("answer") and not columns.is_absent("prompt")
        if not (has_pair or columns.is_given("prompt_field") or columns.is_given("response_field")):
            for role in ("messages", "text"):
                if (found := columns.find(role, f"{role}_field")) is not None:
                    return {role: found}
        prompt, answer = columns.need("prompt", "prompt_field"), columns.need("answer", "response_field")
        return {"prompt": prompt, "answer": answer}

    def draft(self, record: Record, roles: Mapping[str, str], writer: ChatWriter) -> Draft:
        if "text" in roles:
            text = text_of(roles["text"], record[roles["text"]])
            return Draft(prompt="", responses=(Response(text=text),), has_prompt=False)
        if "messages" in roles:
            return self._of_chat(writer.chat(roles["messages"], record[roles["messages"]]), writer)
        prompt, answer = record[roles["prompt"]], record[roles["answer"]]
        if isinstance(prompt, str) and isinstance(answer, str) and not (self.as_chat or self.system):
            texts = text_of(roles["prompt"], prompt), Response(text=text_of(roles["answer"], answer))
            return Draft(prompt=texts[0], responses=(texts[1],))
        chat = _chat_of(prompt, roles["prompt"], writer)
        return self._of_chat([*chat, *_turns_of(answer, roles["answer"])], writer)

    def _of_chat(self, chat: Chat, writer: ChatWriter) -> Draft:
        return writer.all_turns(chat) if self.loss_on == "all" else writer.last_turn(chat)

    def columns(self, row: EncodedRow) -> dict[str, Tokens]:
        prompt, response = row.prompt, row.responses[0]
        columns = {"tokens": prompt + response, "prompt_length": [len(prompt)]}
        if self.loss_on == "all":
            in_loss = [1] * len(response) if row.in_loss is None else row.in_loss
            columns["loss_mask"] = [0] * len(prompt) + in_loss
        return columns


@dataclass(frozen=True, kw_only=True)
class PreferenceDataset(PairOptions, TextDataset):
    """Pairs: `prompt`, and `chosen`, `rejected` as whole sequences (prompt, response, end token).

    `chosen` and `rejected` are texts or lists of messages, behind a prompt of the same form. Without a prompt they are
    whole, and their common beginning is the prompt: of texts up to the last white space before the first difference, of
    chats all equal turns.
    """

    @property
    def keys(self) -> tuple[str, ...]:
        return ("prompt", "chosen", "rejected")

    def roles(self, columns: Columns) -> dict[str, str]:
        sides = {role: columns.need(role, f"{role}_field") for role in ("chosen", "rejected")}
        prompt = columns.find("prompt", "prompt_field")
        return sides if prompt is None else {"prompt": prompt, **sides}

    def draft(self, record: Record, roles: Mapping[str, str], writer: ChatWriter) -> Draft:
        sides = [(roles[role], record[roles[role]]) for role in ("chosen", "rejected")]
        prompt = record[roles["prompt"]] if "prompt" in roles else None
        if isinstance(sides[0][1], list) or isinstance(prompt, list) or self.as_chat or self.system:
            return _pair_of_chats(prompt, roles.get("prompt", ""), sides, writer)
        chosen, rejected = (text_of(*side) for side in sides)
        if "prompt" in roles:
            prompt = text_of(roles["prompt"], prompt)
        else:
            prompt = common_text(chosen, rejected)
            if not prompt:
                raise ValueError(
                    f"the texts {sides[0][0]!r} and {sides[1][0]!r} have no common beginning, which would be the "
                    "prompt; name the column of the prompt with --prompt-field, or delete the line"
                )
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        return Draft(prompt=prompt, responses=(Response(text=chosen), Response(text=rejected)))

    def columns(self, row: EncodedRow) -> dict[str, Tokens]:
        chosen, rejected = (row.prompt + response for response in row.responses)
        return {"prompt": row.prompt, "chosen": chosen, "rejected": rejected}


def common_text(chosen: str, rejected: str) -> str:
    """The words that two texts begin with, and the white space behind them; something is left of each."""
    most = min(len(chosen), len(rejected)) - 1
    length = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    while length > 0 and not chosen[length - 1].isspace():
        length -= 1
    return chosen[:length]


def _pair_of_chats(prompt: object, field: str, sides: list[tuple[str, object]], writer: ChatWriter) -> Draft:
    turns = [_turns_of(value, name) for name, value in sides]
    is_whole = all(side[0]["role"] != "assistant" for side in turns)
    if is_whole:  # a column of prompts beside whole chats repeats them
        chats = [writer.chat(name, value) for name, value in sides]
        most = min(map(len, chats)) - 1
        equal = next((i for i in range(most) if chats[0][i] != chats[1][i]), most)
        chat, turns = chats[0][:equal], [side[equal:] for side in chats]
        if any(side[0]["role"] != "assistant" for side in turns):
            raise ValueError(
                f"the chats {sides[0][0]!r} and {sides[1][0]!r} differ before an answer of the assistant; make "
                "them equal up to there, or delete the line"
            )
    elif prompt is None:
        raise ValueError("its answers have no prompt before them; name the column of the prompt with --prompt-field")
    else:
        chat = _chat_of(prompt, field, writer)
    return writer.answers(chat, turns)


def _chat_of(value: object, column: str, writer: ChatWriter) -> Chat:
    if not isinstance(value, list):
        return writer.of_text(text_of(column, value))
    chat = writer.chat(column, value)
    if chat[-1]["role"] == "assistant":
        raise ValueError(
            f"the chat {column!r} ends with the assistant's turn, and a prompt ends before it; name it as "
            "--messages-field if it is a whole chat"
        )
    return chat


def _turns_of(value: object, column: str) -> Chat:
    """The turns of a response: a text is one of the assistant's."""
    if isinstance(value, list):
        return turns_of(column, value)
    return [{"role": "assistant", "content": text_of(column, value)}]
