"""The data of a script: what its parameters' annotations name, with their options."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar

from realhf.api.data_options import DataOptions, ExampleOptions, PairOptions
from realhf.api.experiment import Dataset
from realhf.api.script.functions import load
from realhf.api.script.lines import ScriptError
from realhf.base.options import NEEDED, Common


@dataclass(frozen=True, kw_only=True)
class ScriptData(DataOptions):
    """A data set of a script. Its fields are options of the command line: of the first data set without a prefix
    (`--data FILE`), of others by the name of the parameter (`--pretraining.data FILE`).
    """

    DATASET: ClassVar[str]  # MODULE:CLASS, loaded by its name: data sets lie above the API

    HEADING = NEEDED

    data: Annotated[
        str,
        Common(
            "JSONL or parquet file, a folder or a pattern of such files, a data set that `datasets` saved, or a task "
            "(`realhf data --list`)",
            metavar="FILE",
        ),
    ] = ""

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
class Examples(ExampleOptions, ScriptData):
    """Prompts with responses to learn, or chats: `tokens` (prompt, response, end token), `prompt_length` [1]; with
    `--loss-on all` also `loss_mask`."""

    DATASET: ClassVar[str] = "realhf.data.datasets:SFTDataset"


@dataclass(frozen=True, kw_only=True)
class Pairs(PairOptions, ScriptData):
    """Prompts with a better and a worse answer: `prompt`, and `chosen`, `rejected`, which begin with it."""

    DATASET: ClassVar[str] = "realhf.data.datasets:PreferenceDataset"
