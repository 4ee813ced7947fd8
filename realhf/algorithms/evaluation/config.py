"""Settings of the rule-checked accuracy."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from realhf.api.generation import GenerationOptions
from realhf.base.errors import UserError
from realhf.dataflow.interface import InterfaceConfig


@dataclass(frozen=True, kw_only=True)
class SampledAccuracy(GenerationOptions, InterfaceConfig):
    """GENERATE: how often the response to `prompt` is exactly `answer`: the same text, and then the end token.

    Texts are compared because one text can be cut into tokens in several ways; `tokenizer` turns both into text.

    Statistics: `name` (a share from 0 to 1) and `name`_response_length (tokens). No outputs.
    """

    implementation: ClassVar[str] = "realhf.algorithms.evaluation.interface:SampledAccuracyInterface"

    name: str = "accuracy"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end_token < 0:
            raise UserError(
                f"eos_token={self.eos_token}: an answer is right only with its end token; give that of the tokenizer"
            )
        if not Path(self.tokenizer).is_file():
            raise UserError(
                f"tokenizer={self.tokenizer!r}: no such file, and answers are compared as text; give the path of the "
                "model's tokenizer.json"
            )
