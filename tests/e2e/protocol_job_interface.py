"""What the calls of `protocol_job.py` do."""

import torch
from protocol_job import Agreement, TokenScore

from realhf.algorithms.statistics import mean_of
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult, Context, Model


class TokenScoreInterface:
    def __init__(self, config: TokenScore):
        self._output = config.output

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        sums = torch.stack([seq.sum() for seq in batch.data["seq"]]).double()
        # Whole numbers: their sum does not depend on the order.
        total, count = context.sum_over_data_parallel(torch.stack([sums.sum(), torch.tensor(float(len(sums)))]))
        scores = [seq.double().sin().mean()[None] - total / count for seq in batch.data["seq"]]
        return CallResult(outputs={self._output: scores}, stats={f"{self._output}_tokens": mean_of(sums)})


class AgreementInterface:
    def __init__(self, config: Agreement):
        pass

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        columns = torch.stack([torch.cat(column) for column in batch.data.values()])  # [keys, samples]
        return CallResult(stats={"disagreements": mean_of((columns != columns[0]).any(0))})
