"""Rows of a data set as tensors, for the workers."""

from collections.abc import Sequence

import torch

from realhf.data.datasets import JSONLDataset, Tokens
from realhf.data.order import row_of
from realhf.engine.batch import Batch


class DatasetReader:
    """Reads samples of any step, in any order; rows are tokenised at first use and kept.

    Args:
        seed: determines the order of the rows, which is new in every epoch; None takes the rows
            as they stand in the file, once (evaluation).
        batch_size: samples a step, over all workers.

    Raises:
        UserError: the file cannot be read.
    """

    def __init__(self, dataset: JSONLDataset, seed: int | None, batch_size: int):
        self.dataset = dataset
        self.seed = seed
        self.batch_size = batch_size
        self._encoder = dataset.encoder()
        self._lines = dataset.lines()
        self._rows: dict[int, dict[str, Tokens]] = {}

    @property
    def num_rows(self) -> int:
        return len(self._lines)

    def read(self, step: int, sample_ids: Sequence[int], keys: Sequence[str]) -> Batch:
        """The samples `sample_ids` (places in the global batch) of a step; per key int64 tensors [length].

        Raises:
            UserError: a line that the data set's `check` would have refused.
        """
        if self.seed is None:
            rows = [step * self.batch_size + sample_id for sample_id in sample_ids]
            assert all(row < self.num_rows for row in rows), f"rows {rows} of {self.num_rows}"
        else:
            rows = row_of(self.seed, self.num_rows, self.batch_size, step, sample_ids)
        records = [self._row(row) for row in rows]
        data = {key: [torch.tensor(record[key], dtype=torch.int64) for record in records] for key in keys}
        return Batch(tuple(sample_ids), data)

    def _row(self, row: int) -> dict[str, Tokens]:
        if row not in self._rows:
            self._rows[row] = self.dataset.encode(self._lines[row], row + 1, self._encoder)
        return self._rows[row]
