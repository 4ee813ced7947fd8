"""Settings of plain generation: one response for every prompt."""

from dataclasses import dataclass
from typing import ClassVar

from realhf.api.generation import GenerationOptions
from realhf.dataflow.interface import InterfaceConfig


@dataclass(frozen=True, kw_only=True)
class Rollout(GenerationOptions, InterfaceConfig):
    """GENERATE: a model's response to `prompt`.

    Outputs: `sequence_key` (prompt and response), `logprob`, `untruncated_logprob` and `margin` of the drawn
    tokens (see `realhf.engine.interface.GenerationOutput`).
    """

    implementation: ClassVar[str] = "realhf.algorithms.rollout.interface:RolloutInterface"
    recordable: ClassVar[tuple[str, ...]] = ("logprob", "untruncated_logprob", "margin", "logits")

    sequence_key: str = "seq"
