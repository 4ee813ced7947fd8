"""The options of data sets by kind: what a data set of `realhf.data` is made with, and a script offers to its users."""

from dataclasses import dataclass
from typing import Literal, get_args

from realhf.base.errors import UserError

TooLong = Literal["error", "drop", "truncate_left"]
LossOn = Literal["last", "all"]

# Chat templates that ask for today's date get this one unless the user gives another: a run that goes on tomorrow has
# to see the same prompts. It is the date that Llama 3.1's template writes where it gets none.
DEFAULT_DATE = "2024-07-26"


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The options of every kind.

    max_prompt_tokens: the most tokens of a prompt, its begin token included.
    max_tokens: the most tokens of a prompt with its response.
    too_long: what happens to longer rows: "error" names the first one; "drop" leaves them out; "truncate_left" takes
        tokens from the prompt's beginning, and leaves out a row whose response alone is too long.
    end_token: the text of the token that ends a response; empty: the tokenizer's.
    prompt_field: the column of the prompt, a text or a chat (a list of messages); empty: found by its name.
    messages_field: the column of a whole chat; empty: found by its name.
    as_chat: makes a prompt that is a text the user's turn of a chat.
    system: the content of a system's turn in front of chats without one.
    chat_template: takes the place of the tokenizer's: a file of Jinja text, the text, or the name of one of several.
    chat_date: the date that templates write as today's.
    """

    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    too_long: TooLong = "error"
    end_token: str = ""
    prompt_field: str = ""
    messages_field: str = ""
    as_chat: bool = False
    system: str = ""
    chat_template: str = ""
    chat_date: str = DEFAULT_DATE

    def __post_init__(self) -> None:
        for name in ("max_prompt_tokens", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value} must be at least 1")
        if self.too_long not in get_args(TooLong):
            raise UserError(f"too_long={self.too_long!r} is not known; choose from {', '.join(get_args(TooLong))}")


@dataclass(frozen=True, kw_only=True)
class ExampleOptions(DataOptions):
    """The options of examples to learn from.

    response_field: the column of the response; empty: found by its name.
    text_field: the column of texts that are all response; empty: found by its name.
    loss_on: of a chat, the assistant's "last" turn has the loss, or "all" of them.
    """

    response_field: str = ""
    text_field: str = ""
    loss_on: LossOn = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_on not in get_args(LossOn):
            raise UserError(f"loss_on={self.loss_on!r} is not known; choose from {', '.join(get_args(LossOn))}")


@dataclass(frozen=True, kw_only=True)
class PairOptions(DataOptions):
    """The options of preference pairs.

    chosen_field, rejected_field: the columns of the better and of the worse response; empty: found by their names.
    """

    chosen_field: str = ""
    rejected_field: str = ""
