"""The data of a script: what its parameters' annotations name, with their options."""

import dataclasses
import importlib
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from realhf.api.experiment import Dataset
from realhf.api.script.lines import ScriptError


@dataclass(frozen=True, kw_only=True)
class ScriptData:
    """A data set of a script. Its fields are options of the command line: of the first data set without a prefix
    (`--data FILE`), of others by the name of the parameter (`--pretraining.data FILE`).

    data: JSONL or parquet, a folder or a pattern of such files, or what `datasets` saved. The other fields are those of
        `realhf.data.text_dataset.TextDataset`.
    """

    DATASET: ClassVar[str]  # MODULE:CLASS, loaded by its name: data sets lie above the API

    data: str = ""
    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    too_long: Literal["error", "drop", "truncate_left"] = "error"
    end_token: str = ""
    prompt_field: str = ""
    messages_field: str = ""
    as_chat: bool = False
    system: str = ""
    chat_template: str = ""

    def dataset(self, name: str, tokenizer: str) -> Dataset:
        """The data set of the parameter `name`. Raises UserError where no file is given."""
        if not self.data:
            raise ScriptError(f"the data {name!r} is not given; name its file: --data FILE")
        settings = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.name != "data"}
        made: Dataset = load(self.DATASET)(path=self.data, tokenizer=tokenizer, **settings)
        return made


@dataclass(frozen=True, kw_only=True)
class Prompts(ScriptData):
    """Prompts: the column `prompt`. Functions on texts see the other columns of the file."""

    DATASET: ClassVar[str] = "realhf.data.datasets:PromptDataset"


@dataclass(frozen=True, kw_only=True)
class Examples(ScriptData):
    """Prompts with answers to learn: `tokens` (prompt, answer, end token) and `prompt_length` [1]; with loss_on="all"
    also `loss_mask` [tokens], 1 for the tokens of all turns of the assistant."""

    DATASET: ClassVar[str] = "realhf.data.datasets:SFTDataset"

    response_field: str = ""
    text_field: str = ""
    loss_on: Literal["last", "all"] = "last"


@dataclass(frozen=True, kw_only=True)
class Pairs(ScriptData):
    """Prompts with a better and a worse answer: `prompt`, and `chosen`, `rejected`, which begin with it."""

    DATASET: ClassVar[str] = "realhf.data.datasets:PreferenceDataset"

    chosen_field: str = ""
    rejected_field: str = ""


def load(name: str) -> Any:
    """What MODULE:NAME names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
