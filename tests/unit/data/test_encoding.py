"""Drafts as tokens, by hand: one token a letter, `<bos>` 1, `<eos>` 2, `a` 4 and so on, a space 31."""

import re
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from realhf.api.data_options import DataOptions, TooLong
from realhf.data import sort_task
from realhf.data.drafts import Draft, Response
from realhf.data.encoding import DraftEncoder, EncodedRow
from realhf.data.tokenizer import TextTokenizer

A, B, C, D, BEGIN, END, SPACE, STAR = 4, 5, 6, 7, 1, 2, 31, 30


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    sort_task.make_tokenizer().save(str(path))
    return TextTokenizer(path)


NO_LIMITS = DataOptions()


def one(
    tokenizer: TextTokenizer, draft: Draft, limits: DataOptions = NO_LIMITS, *, joins: bool = True
) -> EncodedRow | None:
    [found] = DraftEncoder(tokenizer, END, limits, joins=joins).encode([draft])
    return found


def text(*responses: str, prompt: str = "ab", is_chat: bool = False) -> Draft:
    return Draft(prompt=prompt, responses=tuple(Response(text=each) for each in responses), is_chat=is_chat)


def whole(response: str, *spans: tuple[int, int], prompt: str = "ab", is_chat: bool = True) -> Draft:
    """What a template wrote."""
    told = Response(text=response, is_whole=True, spans=spans or None)
    return Draft(prompt=prompt, responses=(told,), is_chat=is_chat)


TEXT = Draft(prompt="", responses=(Response(text="abc"),), has_prompt=False)


@pytest.mark.parametrize(
    ("limits", "may_drop"),
    [
        (DataOptions(), False),
        (DataOptions(too_long="drop"), False),
        (DataOptions(max_tokens=3), False),
        (DataOptions(max_tokens=3, too_long="drop"), True),
        (DataOptions(max_prompt_tokens=3, too_long="truncate_left"), True),
        (DataOptions(max_prompt_tokens=3, max_tokens=3, too_long="error"), False),
    ],
)
def test_whether_limits_may_drop_a_row(limits: DataOptions, may_drop: bool) -> None:
    assert limits.may_drop is may_drop


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        (text(), EncodedRow([BEGIN, A, B], [])),
        (text("c", "dc"), EncodedRow([BEGIN, A, B], [[C, END], [D, C, END]])),
        (text("c", is_chat=True), EncodedRow([A, B], [[C, END]])),
        (whole("abc"), EncodedRow([A, B], [[C, END]])),
        (whole("abc<eos>"), EncodedRow([A, B], [[C, END]])),
        (TEXT, EncodedRow([BEGIN], [[A, B, C, END]], None, True)),
        # Of texts that are no chats, the response has no begin token where the prompt has one.
        (whole("abc", is_chat=False), EncodedRow([BEGIN, A, B], [[C, END]])),
    ],
)  # fmt: skip
def test_prompts_and_responses(draft: Draft, expected: EncodedRow, tokenizer: TextTokenizer) -> None:
    assert one(tokenizer, draft) == expected


def test_many_drafts_keep_their_order(tokenizer: TextTokenizer) -> None:
    """One text may be a prompt of a chat, one of none, and a response."""
    drafts = [
        text("b", prompt="a"),
        text("a", prompt="b", is_chat=True),
        text("b", prompt="a", is_chat=True),
        text("A"),
    ]
    rows = DraftEncoder(tokenizer, END, DataOptions(), joins=True).encode(drafts)
    assert next(rows) == EncodedRow([BEGIN, A], [[B, END]])
    assert next(rows) == EncodedRow([B], [[A, END]])
    assert next(rows) == EncodedRow([A], [[B, END]])
    with pytest.raises(ValueError, match=r"^'A' in 'A' has no token in the tokenizer$"):
        next(rows)


@pytest.mark.parametrize(
    ("response", "tokens"),
    [
        ("c", [C, END]),
        ("c ", [C, SPACE, END]),
        ("c<eos>", [C, END]),
        ("c<eos>  ", [C, END]),
        ("c<eos>d", [C, END, D, END]),
        ("c<eos>d<eos> ", [C, END, D, END]),
        ("<eos>", [END]),
        ("c<pad>", [C, 0, END]),
    ],
)
def test_a_response_ends_with_one_end_token(response: str, tokens: list[int], tokenizer: TextTokenizer) -> None:
    """A template's white space behind it is left out."""
    assert one(tokenizer, text(response)) == EncodedRow([BEGIN, A, B], [tokens])


def test_every_token_that_may_end_a_response_counts(tokenizer: TextTokenizer) -> None:
    """The tokenizer's and the one that is given; the given one ends what has none."""
    [found] = DraftEncoder(tokenizer, STAR, DataOptions(), joins=True).encode([text("c<eos>", "c*", "c")])
    assert found == EncodedRow([BEGIN, A, B], [[C, END], [C, STAR], [C, STAR]])


@pytest.mark.parametrize(
    ("spans", "prompt", "response", "in_loss"),
    [
        ([(2, 3)], [A, B], [C, D, A, END], [1, 0, 0, 1]),
        ([(2, 4)], [A, B], [C, D, A, END], [1, 1, 0, 1]),
        ([(2, 3), (4, 5)], [A, B], [C, D, A, END], [1, 0, 1, 1]),
        ([(4, 5)], [A, B, C, D], [A, END], [1, 1]),
        ([(0, 1)], [A], [B, C, D, A, END], [0, 0, 0, 0, 1]),
        ([(1, 2)], [A], [B, C, D, A, END], [1, 0, 0, 0, 1]),
    ],
)
def test_the_loss_lies_on_spans(
    spans: list[tuple[int, int]], prompt: list[int], response: list[int], in_loss: list[int], tokenizer: TextTokenizer
) -> None:
    """What comes before the first is the prompt, which has a token at least; the end token is in the loss."""
    assert one(tokenizer, whole("abcda", *spans)) == EncodedRow(prompt, [response], in_loss)


def test_white_space_behind_an_end_token_is_in_no_mask(tokenizer: TextTokenizer) -> None:
    assert one(tokenizer, whole("abc<eos>  ", (2, 8))) == EncodedRow([A, B], [[C, END]], [1, 1])
    assert one(tokenizer, whole("abcd<eos> ", (2, 3))) == EncodedRow([A, B], [[C, D, END]], [1, 0, 0])
    with pytest.raises(ValueError, match=r"^the assistant's turns have no tokens$"):
        one(tokenizer, whole("abc", (2, 2)))
    with pytest.raises(ValueError, match="'A' in 'abA' has no token"):
        one(tokenizer, whole("abA", (2, 3)))


def limits(prompt: int | None, both: int | None, too_long: TooLong) -> DataOptions:
    return DataOptions(max_prompt_tokens=prompt, max_tokens=both, too_long=too_long)


PROMPT = [BEGIN, A, B, C]  # and a response of two tokens


@pytest.mark.parametrize(
    ("prompt", "both", "cut"),
    [
        (4, None, PROMPT),
        (None, 6, PROMPT),
        (4, 6, PROMPT),
        (3, None, [BEGIN, B, C]),
        (None, 5, [BEGIN, B, C]),
        (3, 9, [BEGIN, B, C]),
        (9, 5, [BEGIN, B, C]),
        (2, None, [BEGIN, C]),
        (1, None, [C]),
        (1, 9, [C]),
        (None, 3, [C]),
        (None, 2, None),
        (None, 1, None),
        (3, 2, None),
    ],
)
def test_a_prompt_within_limits(
    prompt: int | None, both: int | None, cut: list[int] | None, tokenizer: TextTokenizer
) -> None:
    """It is cut on the left behind its begin token, which goes last; without room for a token the row is left out."""
    draft = text("d", prompt="abc")
    fits = cut == PROMPT
    found = one(tokenizer, draft, limits(prompt, both, "truncate_left"))
    assert found == (None if cut is None else EncodedRow(cut, [[D, END]], is_cut=not fits))
    dropped = one(tokenizer, draft, limits(prompt, both, "drop"))
    assert dropped == (EncodedRow(PROMPT, [[D, END]]) if fits else None)
    if fits:
        assert one(tokenizer, draft, limits(prompt, both, "error")) == dropped
    else:
        with pytest.raises(ValueError, match="shorten it"):
            one(tokenizer, draft, limits(prompt, both, "error"))


def test_a_prompt_without_a_begin_token_keeps_its_end(tokenizer: TextTokenizer) -> None:
    found = one(tokenizer, text("d", prompt="abc", is_chat=True), limits(2, None, "truncate_left"))
    assert found == EncodedRow([B, C], [[D, END]], is_cut=True)


def test_a_token_that_begins_a_text_stays(tmp_path: Path) -> None:
    """The one that has this name, and the one that the tokenizer puts before a text; not what it puts behind it."""
    tokenizer = sort_task.make_tokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", pair=None, special_tokens=[("<bos>", BEGIN), ("<eos>", END)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "*"}')
    found = TextTokenizer(tmp_path)
    for prompt, kept in (("*abc", [STAR, C]), ("<bos>abc", [BEGIN, C]), ("<eos>abc", [B, C]), ("aabc", [B, C])):
        cut = one(found, text("d", prompt=prompt, is_chat=True), limits(2, None, "truncate_left"))
        assert cut == EncodedRow(kept, [[D, END]], is_cut=True)


def test_the_longest_response_counts_where_it_follows_the_prompt(tokenizer: TextTokenizer) -> None:
    draft = text("d", "dd")  # three tokens, and two or three
    assert one(tokenizer, draft, limits(None, 6, "drop")) is not None
    assert one(tokenizer, draft, limits(None, 5, "drop")) is None
    assert one(tokenizer, draft, limits(None, 3, "drop"), joins=False) is not None
    assert one(tokenizer, draft, limits(None, 2, "drop"), joins=False) is None
    assert one(tokenizer, text(), limits(None, 3, "drop")) is not None
    assert one(tokenizer, text(), limits(None, 2, "drop")) is None


@pytest.mark.parametrize(
    ("both", "cut"),
    [
        (5, EncodedRow([BEGIN], [[A, B, C, END]], None, True)),
        (4, EncodedRow([A], [[B, C, END]], None, True, True)),
        (2, EncodedRow([C], [[END]], None, True, True)),
        (1, None),
    ],
)
def test_a_text_without_a_prompt_is_cut_as_a_whole(both: int, cut: EncodedRow | None, tokenizer: TextTokenizer) -> None:
    assert one(tokenizer, TEXT, limits(None, both, "truncate_left")) == cut


@pytest.mark.parametrize(
    ("prompt", "both", "message"),
    [
        (3, None, "the prompt has 4 tokens, more than --max-prompt-tokens 3; {}, or raise --max-prompt-tokens"),
        (3, 5, "the prompt has 4 tokens, more than --max-prompt-tokens 3; {}, or raise --max-prompt-tokens"),
        (None, 5, "the sequence has 6 tokens, more than --max-tokens 5; {}, or raise --max-tokens"),
        (4, 5, "the sequence has 6 tokens, more than --max-tokens 5; {}, or raise --max-tokens"),
    ],
)
def test_the_limit_that_a_row_is_beyond(
    prompt: int | None, both: int | None, message: str, tokenizer: TextTokenizer
) -> None:
    remedy = "shorten it, delete the line, or set --too-long to drop or truncate_left"
    with pytest.raises(ValueError, match=f"^{re.escape(message.format(remedy))}$"):
        one(tokenizer, text("d", prompt="abc"), limits(prompt, both, "error"))
