"""The data of a script: what its parameters' annotations name, with their options."""

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

from realhf.api.experiment import Dataset
from realhf.api.script.lines import ScriptError


@dataclass(frozen=True, kw_only=True)
class ScriptData:
    """A data set of a script. Its fields are options of the command line: of the first data set without a prefix
    (`--data FILE`), of others by the name of the parameter (`--pretraining.data FILE`).

    data: a JSONL file.
    max_prompt_tokens: a longer prompt is an error.
    end_token: the text of the token that ends an answer.
    """

    DATASET: ClassVar[str]  # MODULE:CLASS, loaded by its name: data sets lie above the API

    data: str = ""
    max_prompt_tokens: int = 1024
    end_token: str = "<eos>"

    def dataset(self, name: str, tokenizer: str) -> Dataset:
        """The data set of the parameter `name`. Raises UserError where no file is given."""
        if not self.data:
            raise ScriptError(f"the data {name!r} is not given; name its file: --data FILE")
        made: Dataset = load(self.DATASET)(path=self.data, tokenizer=tokenizer, **self._settings())
        return made

    def _settings(self) -> dict[str, Any]:
        return {"max_prompt_tokens": self.max_prompt_tokens, "end_token": self.end_token}


@dataclass(frozen=True, kw_only=True)
class Prompts(ScriptData):
    """Prompts: the column `prompt`."""

    DATASET: ClassVar[str] = "realhf.data.datasets:PromptDataset"


@dataclass(frozen=True, kw_only=True)
class Examples(ScriptData):
    """Prompts with answers to learn: `tokens` (prompt, answer, end token) and `prompt_length` [1]."""

    DATASET: ClassVar[str] = "realhf.data.datasets:SFTDataset"


@dataclass(frozen=True, kw_only=True)
class Pairs(ScriptData):
    """Prompts with a better and a worse answer: `prompt`, and `chosen`, `rejected`, which begin with it."""

    DATASET: ClassVar[str] = "realhf.data.datasets:PreferenceDataset"


def load(name: str) -> Any:
    """What MODULE:NAME names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
