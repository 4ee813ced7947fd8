"""Samples for reward functions, from rows of the data set and responses. No torch here."""

from collections.abc import Sequence
from typing import Any

from realhf.rewards.signature import Sample

_CHAT_COLUMNS = ("prompt", "messages", "conversation", "conversations")


def sample_of(
    row: dict[str, Any],
    *,
    prompt: str,
    response: str,
    tokens: Sequence[int],
    with_tokens: bool,
    token_texts: Sequence[str] = (),
) -> Sample:
    """A response to the prompt of a row, as the first sample of a run's first step. `tokens` are those of the response;
    the sample has them where a function asks for them (`with_tokens`), and so `token_texts`."""
    return Sample(
        id=0,
        step=0,
        steps=1,
        prompt=prompt,
        response=response,
        tokens=tuple(tokens) if with_tokens else (),
        num_tokens=len(tokens),
        token_texts=tuple(token_texts),
        messages=messages_of(row),
        row=row,
    )


def messages_of(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The prompt as a chat, where the row has one: all messages before the answer."""
    if isinstance(row.get("prompt"), str):
        return None
    for name in (*_CHAT_COLUMNS, *row):
        found = row.get(name)
        if isinstance(found, list) and found and all(isinstance(m, dict) and "role" in m for m in found):
            return found[:-1] if found[-1]["role"] == "assistant" else found
    return None
