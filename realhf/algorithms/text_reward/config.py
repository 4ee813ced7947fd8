"""Settings of rewards on texts."""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar

from realhf.algorithms.text_reward.trial import try_rewards
from realhf.api.script.config import ScriptCall
from realhf.base.errors import UserError
from realhf.dataflow.interface import Nulls
from realhf.rewards.pool import FunctionOptions
from realhf.rewards.sources import READY, RewardSource, load_rewards, notes_of


@dataclass(frozen=True, kw_only=True)
class TextReward(FunctionOptions, ScriptCall):
    """INFERENCE: `reward` [1] float32 of `prompt` and `seq`, by functions on texts; runs beside the devices.

    The reward of a sample is the sum of weight * value over the functions that give it a value. It is [response] where
    a function gives a value for each token; a value for the whole response is then a part of the last token's. Where
    `on_error` is "drop", the call also has the output `valid` [1]: 0 for a sample that is to count in no loss and no
    statistic.

    Statistics, where values of tokens count as their sum: `reward_total` (the mean reward of the samples that count),
    `reward_NAME` for each function (the mean of the values that it gave), `reward_failures` (the share of samples for
    which a function failed) and `reward_seconds` (of all functions, a sample), and what functions of TRL's form log
    (`log_metric`), with `prefix` in front of them.
    """

    implementation: ClassVar[str] = "realhf.algorithms.text_reward.interface:TextRewardInterface"
    uses_model: ClassVar[bool] = False
    runs_beside: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("reward", "valid")

    rewards: tuple[str, ...]
    """The functions: `FILE.py:FUNCTION` or `ready:NAME(option=value)`, each with `=WEIGHT` behind it if it is not 1."""
    tokenizer: str
    """The model's directory, or its tokenizer.json: turns prompts and responses into texts, without special tokens."""
    eos_token: int = -1
    """Taken off the end of a response if it is none of the tokenizer's special tokens; -1: nothing is."""
    stop_strings: tuple[str, ...] = ()
    """Those of the generation: taken off the end of a response."""
    prefix: str = ""

    def __post_init__(self) -> None:
        if not self.rewards:
            raise UserError("rewards=() names no reward function; give at least one (--reward FILE.py:FUNCTION)")
        for reward in self.rewards:
            RewardSource.parse(reward)
        super().__post_init__()

    @property
    def processes_per_worker(self) -> int:
        """As the planner counts them: at least one."""
        return max(1, self.processes)

    @property
    def output_data(self) -> tuple[str, ...]:
        """The keys that the call makes."""
        return super().output_data[: 2 if self.on_error == "drop" else 1]

    def pool_options(self, processes: int) -> FunctionOptions:
        """Those of its functions, with `processes` where it leaves their number open."""
        given = {field.name: getattr(self, field.name) for field in fields(FunctionOptions)}
        return FunctionOptions(**given | {"processes": self.processes or processes})

    @property
    def read_files(self) -> tuple[str, ...]:
        sources = map(RewardSource.parse, self.rewards)
        return tuple(dict.fromkeys(source.module for source in sources if source.module != READY))

    def check_columns(self, columns: Collection[str]) -> None:
        """Loads the functions, and compares their parameters with the columns of the data. Prints what the kernel of
        this machine cannot keep programs in unit tests from."""
        load_rewards(self.rewards, columns)
        for note in notes_of(self.rewards):
            _print_note(note)

    def check_nulls(self, nulls: Mapping[str, Nulls]) -> None:
        """Prints which rows have no value for a function. Raises UserError where none has one."""
        for reward in load_rewards(self.rewards):
            for column in reward.signature.columns_read(nulls):
                found = nulls[column]
                what = f"reward {reward.place} reads {column!r}, which is null or missing in"
                if found.rows == found.of_rows:
                    raise UserError(
                        f"{what} all {found.of_rows} rows ({found.first_at} is the first); give the data values there, "
                        "read another column, or give the parameter a default"
                    )
                if found.rows:
                    rows = f"{found.rows:,} of {found.of_rows:,} rows"
                    _print_note(f"{what} {rows} ({found.first_at} is the first): the function gets None there")

    def check_row(self, row: dict[str, Any], tokens: Mapping[str, Sequence[int]]) -> None:
        """Calls the functions with the row and a made-up response, see `try_rewards`."""
        prompt = tokens.get(dict(self.batch.columns).get("prompt", "prompt"))
        if prompt is not None:  # of the data set, and not of another call
            try_rewards(self.rewards, self.pool_options(1), self.tokenizer, row, prompt)


@cache  # a launcher checks several graphs
def _print_note(note: str) -> None:
    print(f"note: {note}", file=sys.stderr)
