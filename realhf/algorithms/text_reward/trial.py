"""The call of reward functions before a run starts, with the first row of the data and a made-up response. No torch
here."""

import io
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from realhf.algorithms.text_reward.samples import sample_of
from realhf.base.errors import UserError
from realhf.data.tokenizer import TextTokenizer
from realhf.rewards.jobs import NoRewardError, RewardError
from realhf.rewards.pool import FunctionOptions, RewardPool
from realhf.rewards.sources import RewardSource

# A number is a response that most functions can read: as a text, as a number, as JSON, as a program.
RESPONSE = "0"


def try_rewards(
    rewards: Sequence[str], options: FunctionOptions, tokenizer: str, row: dict[str, Any], prompt: Sequence[int]
) -> None:
    """Calls the functions once, in a process as the run's, and discards what they return and print. An HTTP server is
    not asked: it may start later.

    Raises UserError where a function raises, takes too long or gives no reward; a note on standard error says so where
    `on_error` lets the run go on.
    """
    called = [reward for reward in rewards if not RewardSource.parse(reward).asks_a_server]
    if not called:
        return
    texts = TextTokenizer(tokenizer)
    try:
        tokens = texts.encode(RESPONSE, special=False)
    except ValueError:  # a small vocabulary
        tokens = []
    sample = sample_of(
        row,
        prompt=texts.decode(prompt),
        response=RESPONSE,
        tokens=tokens,
        with_tokens=True,
        token_texts=texts.pieces(tokens),
    )
    try:
        pool = RewardPool(called, replace(options, on_error="fail", processes=1), log=io.BytesIO())
        try:
            pool.score([sample])
        finally:
            pool.close()
    except NoRewardError as error:
        failure = error.failure
        if failure.kind == "none" and len(called) < len(rewards):  # the server may have a reward
            return
        text = (
            f"reward {failure.place}, called before the start with the first row of the data (prompt "
            f"{failure.question!r}) and the response {RESPONSE!r}: {failure.reason}"
        )
        if options.on_error == "fail":
            raise UserError(f"{text}; {failure.remedy}") from None
        print(f"note: {text}; the run goes on, by --reward.on-error {options.on_error}", file=sys.stderr)
    except RewardError as error:
        raise UserError(str(error)) from None
