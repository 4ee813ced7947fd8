"""The share of prompts that are answered right, checked by a rule."""

from pathlib import Path

from torch import Tensor

from realhf.algorithms.script.rollouts import generate
from realhf.api.script.config import SampledAccuracy
from realhf.data.tokenizer_file import load_tokenizer
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult, Context, Model


class SampledAccuracyInterface:
    """See `SampledAccuracy`."""

    def __init__(self, config: SampledAccuracy):
        self.config = config
        self._tokenizer = load_tokenizer(Path(config.tokenizer))

    def generate(self, model: Model, batch: Batch, context: Context) -> CallResult:
        c, columns = self.config, dict(self.config.batch.columns)
        out = generate(model, batch, context, c)
        if not context.holds_outputs:
            return CallResult()
        pairs = zip(out.sequences, out.logprobs, strict=True)
        given = [sequence[len(sequence) - len(logprob) :] for sequence, logprob in pairs]
        answers = batch.data[columns.get("answer", "answer")]
        texts = [[self._finished(tokens) for tokens in column] for column in (given, answers)]
        right = sum(text is not None and text == answer for text, answer in zip(*texts, strict=True))
        return CallResult(
            stats={
                c.statistic: (float(right), len(batch)),
                f"{c.statistic}_response_length": (float(sum(map(len, given))), len(batch)),
            }
        )

    def _finished(self, tokens: Tensor) -> str | None:
        """The text before the end token; None where no end token comes last."""
        if tokens[-1:].tolist() != [self.config.end_token]:
            return None
        text: str = self._tokenizer.decode(tokens[:-1].tolist(), skip_special_tokens=False)
        return text
