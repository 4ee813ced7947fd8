"""A model method of the user's as a call."""

from collections.abc import Sequence

from realhf.algorithms.script.evaluate import Evaluation
from realhf.algorithms.script.rows import divided
from realhf.api.script.config import OwnMethod
from realhf.api.script.functions import describe_function, load_function
from realhf.engine.batch import Batch, concatenate
from realhf.engine.interface import CallResult, Context, Model
from realhf.engine.returned import InterfaceError


class OwnMethodInterface:
    """See `OwnMethod`."""

    def __init__(self, config: OwnMethod):
        self.config = config

    def generate(self, model: Model, batch: Batch, context: Context) -> CallResult:
        return self._run(model, [batch], context, is_training=False)

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        return self._run(model, [batch], context, is_training=False)

    def train_step(self, model: Model, mini_batches: Sequence[Batch], context: Context) -> CallResult:
        return self._run(model, mini_batches, context, is_training=True)

    def _run(self, model: Model, batches: Sequence[Batch], context: Context, *, is_training: bool) -> CallResult:
        c = self.config
        evaluation = Evaluation(concatenate(batches), context, c.reports)
        whole = evaluation.batch(c.batch)
        given = divided(whole, [len(batch) for batch in batches])
        function = load_function(c.function)
        result = function(model, given if is_training else whole, context, *c.arguments, **dict(c.keywords))
        if not isinstance(result, CallResult):
            raise InterfaceError(
                f"{describe_function(c.function)} returned a {type(result).__name__}, must be a CallResult"
            )
        keys = dict(zip(c.makes, c.outputs, strict=True))
        outputs = {keys.get(name, name): values for name, values in result.outputs.items()}
        return CallResult(outputs=outputs, stats={**evaluation.stats, **result.stats})
