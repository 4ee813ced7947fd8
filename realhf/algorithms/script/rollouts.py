"""The calls of a script that do not train: generation, log-probabilities, values, scores."""

import zlib

import torch
from torch import Tensor

from realhf.algorithms.responses import by_sample, response_logprobs, response_values
from realhf.algorithms.reward.interface import last_scores
from realhf.algorithms.rollout.interface import generate
from realhf.algorithms.script.evaluate import Evaluation
from realhf.algorithms.script.rows import as_rollouts
from realhf.algorithms.statistics import mean_of
from realhf.api.script.config import Generate, Logprobs, Score, ScriptCall, Values
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult, Context, Model, Postprocess
from realhf.parallel.vocabulary import Logits


class GenerateInterface:
    """See `Generate`."""

    def __init__(self, config: Generate):
        self.config = config

    def generate(self, model: Model, batch: Batch, context: Context) -> CallResult:
        c = self.config
        ((_, prompt_key),) = c.view.columns
        batch = batch.with_data(prompt=batch.data[prompt_key])
        out = generate(model, batch, context, c, draw=zlib.crc32(c.name.encode()) if c.name else 0)
        if not context.holds_outputs:
            return CallResult()
        keys = dict(c.outputs)
        # Training computes log-probabilities of the untruncated distribution: the ratio is that of like with like.
        outputs = {
            keys["seq"]: out.sequences,
            keys["logprob"]: out.untruncated_logprobs,
            "margin": out.margins,
            "logits": out.logits,
        }
        return CallResult(outputs={key: values for key, values in outputs.items() if values})


class _Inference:
    """A pass without gradients over the rollouts of a view."""

    def __init__(self, config: ScriptCall):
        self.config = config

    def run(self, model: Model, rollouts: Batch, context: Context, postprocess: Postprocess) -> CallResult:
        """What `postprocess` gives by the names of the columns, under their keys."""
        outputs = model.forward(rollouts, "seq", postprocess, context.micro_batches)
        if not context.holds_outputs:
            return CallResult()
        keys = dict(self.config.outputs)
        return CallResult(outputs={keys[name]: values for name, values in outputs.items()})


class LogprobsInterface(_Inference):
    """See `Logprobs`."""

    config: Logprobs

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        c, evaluation = self.config, Evaluation(batch, context, self.config.reports)
        names = [name for name, _ in c.outputs]
        rollouts = as_rollouts(evaluation.batch(c.view), c.rows)

        def logprobs(logits: Logits, part: Batch) -> dict[str, list[Tensor]]:
            each = by_sample(response_logprobs(logits, part, c.temperature), part)
            if c.rows == "pairs" and not c.per_token:
                each = [values.sum().view(1) for values in each]
            return {names[0]: each}

        result = self.run(model, rollouts, context, logprobs)
        if c.rows != "pairs" or not context.holds_outputs:
            return CallResult(outputs=result.outputs, stats=evaluation.stats) if context.holds_outputs else result
        chosen, rejected = (key for _, key in c.outputs)
        both = result.outputs[chosen]
        return CallResult(outputs={chosen: both[::2], rejected: both[1::2]}, stats=evaluation.stats)


class ValuesInterface(_Inference):
    """See `Values`."""

    config: Values

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        evaluation = Evaluation(batch, context, self.config.reports)
        ((name, _),) = self.config.outputs

        def values(head: Tensor, part: Batch) -> dict[str, list[Tensor]]:
            return {name: by_sample(response_values(head, part), part)}

        result = self.run(model, evaluation.batch(self.config.view), context, values)
        return CallResult(outputs=result.outputs, stats=evaluation.stats) if context.holds_outputs else result


class ScoreInterface(_Inference):
    """See `Score`."""

    config: Score

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        evaluation = Evaluation(batch, context, self.config.reports)
        ((name, _),) = self.config.outputs

        def scores(head: Tensor, part: Batch) -> dict[str, list[Tensor]]:
            return {name: last_scores(head, part, "seq")}

        result = self.run(model, evaluation.batch(self.config.view), context, scores)
        if not context.holds_outputs:
            return result
        given = self.config.statistic
        stats = {given: mean_of(torch.cat(next(iter(result.outputs.values()))))} if given else {}
        return CallResult(outputs=result.outputs, stats={**evaluation.stats, **stats})
