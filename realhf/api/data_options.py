"""The options of data sets by kind: what a data set of `realhf.data` is made with, and a script offers to its users."""

from dataclasses import dataclass
from typing import Annotated, Literal

from realhf.base.options import DATA, Common, Option, Settings

TooLong = Literal["error", "drop", "truncate_left"]
LossOn = Literal["last", "all"]

# Chat templates that ask for today's date get this one unless the user gives another: a run that goes on tomorrow has
# to see the same prompts. It is the date that Llama 3.1's template writes where it gets none.
DEFAULT_DATE = "2024-07-26"


@dataclass(frozen=True, kw_only=True)
class DataOptions(Settings):
    """The options of every kind.

    Under `too_long` "error" an error names the first row that is too long. "drop" leaves such rows out. "truncate_left"
    takes tokens from the prompt's beginning, and leaves out a row whose response alone is too long.
    """

    HEADING = DATA

    max_prompt_tokens: Annotated[
        int | None, Option("most tokens of a prompt, its begin token included", range=(1, None))
    ] = None
    max_tokens: Annotated[int | None, Common("most tokens of a prompt with its response", range=(1, None))] = None
    too_long: Annotated[
        TooLong, Common("longer rows are an error, left out, or lose tokens from the prompt's beginning")
    ] = "error"
    end_token: Annotated[
        str, Option("text of the token that ends a response (default: the tokenizer's)", metavar="TOKEN")
    ] = ""
    prompt_field: Annotated[
        str, Option("column of the prompt, a text or a chat (default: found by its name)", metavar="COLUMN")
    ] = ""
    messages_field: Annotated[str, Option("column of a whole chat (default: found by its name)", metavar="COLUMN")] = ""
    as_chat: Annotated[bool, Common("make a prompt that is a text the user's turn of a chat")] = False
    system: Annotated[str, Option("system's turn in front of chats without one")] = ""
    chat_template: Annotated[
        str,
        Option(
            "template in place of the tokenizer's: a file of Jinja text, the text, or the name of one of several",
            metavar="TEMPLATE",
        ),
    ] = ""
    chat_date: Annotated[str, Option("date that templates write as today's", metavar="DATE")] = DEFAULT_DATE

    @property
    def may_drop(self) -> bool:
        """Whether rows may be left out."""
        return self.too_long != "error" and (self.max_prompt_tokens, self.max_tokens) != (None, None)


@dataclass(frozen=True, kw_only=True)
class ExampleOptions(DataOptions):
    """The options of examples to learn from."""

    response_field: Annotated[str, Option("column of the response (default: found by its name)", metavar="COLUMN")] = ""
    text_field: Annotated[
        str, Option("column of texts that are all response (default: found by its name)", metavar="COLUMN")
    ] = ""
    loss_on: Annotated[LossOn, Common("turns of the assistant in a chat that have the loss")] = "last"


@dataclass(frozen=True, kw_only=True)
class PairOptions(DataOptions):
    """The options of preference pairs."""

    chosen_field: Annotated[
        str, Option("column of the better response (default: found by its name)", metavar="COLUMN")
    ] = ""
    rejected_field: Annotated[
        str, Option("column of the worse response (default: found by its name)", metavar="COLUMN")
    ] = ""
