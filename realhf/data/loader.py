"""Rows of a data set as tensors, for the workers."""

from collections.abc import Sequence

import torch

from realhf.data.rows import DatasetRows
from realhf.engine.batch import Batch


class DatasetReader(DatasetRows):
    """`DatasetRows` that gives tensors."""

    def read(self, step: int, sample_ids: Sequence[int], keys: Sequence[str]) -> Batch:
        """The samples `sample_ids` (indices in the global batch) of a step; per key int64 tensors [length].

        Raises:
            UserError: a line that the data set's `check` would have refused.
        """
        samples = self.tokens(step, sample_ids)
        data = {key: [torch.tensor(sample[key], dtype=torch.int64) for sample in samples] for key in keys}
        return Batch(tuple(sample_ids), data)
