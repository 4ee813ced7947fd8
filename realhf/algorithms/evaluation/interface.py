"""The rule-checked accuracy as a model function call."""

import torch

from realhf.algorithms.evaluation.config import SampledAccuracy
from realhf.algorithms.rollout.interface import generate, responses
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult, Context, Model


class SampledAccuracyInterface:
    """See `SampledAccuracy`."""

    def __init__(self, config: SampledAccuracy):
        self.config = config

    def generate(self, model: Model, batch: Batch, context: Context) -> CallResult:
        c = self.config
        out = generate(model, batch, context, c)
        if not context.holds_outputs:
            return CallResult()
        given = responses(batch, out.sequences)
        right = sum(torch.equal(r, answer) for r, answer in zip(given, batch.data["answer"], strict=True))
        return CallResult(
            stats={
                c.name: (float(right), len(batch)),
                f"{c.name}_response_length": (float(sum(map(len, given))), len(batch)),
            }
        )
