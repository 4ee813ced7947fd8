"""Rewards on texts as a call of a script: of rollouts under any keys."""

from realhf.algorithms.script.evaluate import Evaluation
from realhf.algorithms.statistics import prefixed
from realhf.algorithms.text_reward.interface import TextRewardInterface
from realhf.api.script.config import ScoreTexts
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult, Context, Model


class ScoreTextsInterface:
    """See `ScoreTexts`."""

    def __init__(self, config: ScoreTexts):
        self.config = config
        self._reward = TextRewardInterface(config.reward)

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        c = self.config
        rollouts = Evaluation(batch, context, c.reports).batch(c.view)
        result = self._reward.inference(model, rollouts, context)
        keys = dict(c.outputs)
        outputs = {keys[name]: values for name, values in result.outputs.items()}
        return CallResult(outputs=outputs, stats=prefixed(c.name, result.stats) if c.name else result.stats)
