"""Drafts of rows to tokens, many at a time, within the limits of a data set."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from realhf.api.data_options import DataOptions
from realhf.data.drafts import Draft, Response
from realhf.data.tokenizer import TextTokenizer, Tokens


@dataclass
class EncodedRow:
    """The tokens of a row: its prompt, and each response without the prompt.

    in_loss: [response] 1 or 0, of the first response; None: all are in the loss.
    is_text: the prompt is the first token of a text without a prompt.
    """

    prompt: Tokens
    responses: list[Tokens]
    in_loss: Tokens | None = None
    is_text: bool = False
    is_cut: bool = False


class DraftEncoder:
    """Encodes drafts.

    Args:
        end_token: ends a response that a template has not ended.
        limits: of the options of a data set, the limits that rows have.
        joins: whether a response follows its prompt in one sequence, which `max_tokens` limits.
    """

    def __init__(self, tokenizer: TextTokenizer, end_token: int, limits: DataOptions, *, joins: bool):
        self._tokenizer, self._end, self._limits, self._joins = tokenizer, end_token, limits, joins
        self._ends = {*tokenizer.end_tokens, end_token}
        self._begins = {tokenizer.begin, *tokenizer.encode("")[:1]}

    def encode(self, drafts: Sequence[Draft]) -> Iterator[EncodedRow | None]:
        """The tokens of each draft; None for one that the limits drop. Raises ValueError naming a draft's fault."""
        ids = self._all_ids(drafts)
        for draft in drafts:
            yield self._limited(self._row(draft, ids))

    def _all_ids(self, drafts: Sequence[Draft]) -> dict[tuple[str, bool], Tokens | None]:
        """The tokens of all texts of drafts, by text and whether special tokens are added."""
        texts: dict[bool, dict[str, None]] = {True: {}, False: {}}
        for draft in drafts:
            if draft.has_prompt:
                texts[not draft.is_chat][draft.prompt] = None
            for response in draft.responses:
                if response.spans is None:
                    texts[not draft.has_prompt][response.text] = None
        return {
            (text, special): tokens
            for special, wanted in texts.items()
            for text, tokens in zip(wanted, self._tokenizer.encode_batch(list(wanted), special=special), strict=True)
        }

    def _row(self, draft: Draft, ids: dict[tuple[str, bool], Tokens | None]) -> EncodedRow:
        def tokens_of(text: str, special: bool) -> Tokens:
            found = ids[text, special]
            if found is None:
                raise ValueError(self._tokenizer.unknown_character(text))
            return found

        if not draft.has_prompt:  # nothing predicts the first token, so it stands for the prompt
            first, *rest = self._ended(tokens_of(draft.responses[0].text, True))
            return EncodedRow([first], [rest], is_text=True)
        if draft.responses and draft.responses[0].spans is not None:
            return self._masked(draft.responses[0])
        prompt = tokens_of(draft.prompt, not draft.is_chat)
        responses = []
        for response in draft.responses:
            tokens = tokens_of(response.text, False)
            if response.is_whole and tokens[: len(prompt)] == prompt:
                tokens = tokens[len(prompt) :]
            elif response.is_whole:  # a token would lie across the border; generation begins behind the prompt's own
                tokens = self._tokenizer.encode(response.text[len(draft.prompt) :], special=False)
            responses.append(self._ended(tokens))
        return EncodedRow(prompt, responses)

    def _masked(self, response: Response) -> EncodedRow:
        """A whole text with a loss on some of its characters; the text before the first of them is the prompt."""
        assert response.spans is not None
        tokens, offsets = self._tokenizer.offsets(response.text)
        in_loss = [int(any(begin < end <= last for begin, last in response.spans)) for _, end in offsets]
        if 1 not in in_loss:
            raise ValueError("the assistant's turns have no tokens")
        first = max(1, in_loss.index(1))  # nothing predicts the first token
        ended = self._ended(tokens[first:])
        in_loss = in_loss[first:][: len(ended)]
        return EncodedRow(tokens[:first], [ended], in_loss + [1] * (len(ended) - len(in_loss)))

    def _ended(self, response: Tokens) -> Tokens:
        """A response with an end token as its last: a template's white space behind it is left out, as no model has to
        write it."""
        last = next((i for i in range(len(response) - 1, -1, -1) if response[i] in self._ends), None)
        if last is not None and not self._tokenizer.decode(response[last + 1 :], skip_special=False).strip():
            return response[: last + 1]
        return [*response, self._end]

    def _limited(self, row: EncodedRow) -> EncodedRow | None:
        """The row within the limits, or None. Raises ValueError under too_long="error"."""
        limits, longest = self._limits, max(map(len, row.responses), default=0) if self._joins else 0
        most = [limits.max_prompt_tokens] if limits.max_prompt_tokens is not None else []
        most += [limits.max_tokens - longest] if limits.max_tokens is not None else []
        if not most or len(row.prompt) <= min(most):
            return row
        match limits.too_long:
            case "error":
                raise ValueError(self._too_long(row, longest))
            case "truncate_left" if row.is_text and limits.max_tokens is not None and limits.max_tokens > 1:
                first, *rest = [*row.prompt, *row.responses[0]][-limits.max_tokens :]
                return EncodedRow([first], [rest], is_text=True, is_cut=True)
            case "truncate_left" if min(most) >= 1:
                # The token that begins a text stays, as a model expects it.
                has_begin = row.prompt[0] in self._begins and min(most) > 1
                kept = min(most) - has_begin
                row.prompt = row.prompt[:has_begin] + row.prompt[len(row.prompt) - kept :]
                row.is_cut = True
                return row
        return None

    def _too_long(self, row: EncodedRow, longest: int) -> str:
        limits, remedy = self._limits, "shorten it, delete the line, or set --too-long to drop or truncate_left"
        if limits.max_prompt_tokens is not None and len(row.prompt) > limits.max_prompt_tokens:
            return (
                f"the prompt has {len(row.prompt)} tokens, more than --max-prompt-tokens "
                f"{limits.max_prompt_tokens}; {remedy}, or raise --max-prompt-tokens"
            )
        return (
            f"the sequence has {len(row.prompt) + longest} tokens, more than --max-tokens {limits.max_tokens}; "
            f"{remedy}, or raise --max-tokens"
        )
