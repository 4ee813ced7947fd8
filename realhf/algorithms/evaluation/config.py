"""Settings of the rule-checked accuracy."""

from dataclasses import dataclass
from typing import ClassVar

from realhf.api.generation import GenerationOptions
from realhf.api.interface import InterfaceConfig


@dataclass(frozen=True, kw_only=True)
class SampledAccuracy(GenerationOptions, InterfaceConfig):
    """GENERATE: how often the response to `prompt` is exactly `answer`, its end token included.

    Statistics: `name` (a share from 0 to 1) and `name`_response_length (tokens). No outputs.
    """

    implementation: ClassVar[str] = "realhf.algorithms.evaluation.interface:SampledAccuracyInterface"

    name: str = "accuracy"
