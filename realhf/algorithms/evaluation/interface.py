"""The rule-checked accuracy as a model function call."""

from pathlib import Path

from torch import Tensor

from realhf.algorithms.evaluation.config import SampledAccuracy
from realhf.algorithms.rollout.interface import generate, responses
from realhf.data.tokenizer_file import load_tokenizer
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult, Context, Model


class SampledAccuracyInterface:
    """See `SampledAccuracy`."""

    def __init__(self, config: SampledAccuracy):
        self.config = config
        self._tokenizer = load_tokenizer(Path(config.tokenizer))

    def generate(self, model: Model, batch: Batch, context: Context) -> CallResult:
        c = self.config
        out = generate(model, batch, context, c)
        if not context.holds_outputs:
            return CallResult()
        given = responses(batch, out.sequences)
        texts = [[self._finished(tokens) for tokens in column] for column in (given, batch.data["answer"])]
        right = sum(text is not None and text == answer for text, answer in zip(*texts, strict=True))
        return CallResult(
            stats={
                c.name: (float(right), len(batch)),
                f"{c.name}_response_length": (float(sum(map(len, given))), len(batch)),
            }
        )

    def _finished(self, tokens: Tensor) -> str | None:
        """The text before the end token; None where no end token comes last."""
        if tokens[-1:].tolist() != [self.config.end_token]:
            return None
        text: str = self._tokenizer.decode(tokens[:-1].tolist(), skip_special_tokens=False)
        return text
