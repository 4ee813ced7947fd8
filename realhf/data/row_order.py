"""The row of a data set that is sample i of step t: a new permutation every epoch, the same on every worker."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np


def row_of(split_seed: int, num_rows: int, batch_size: int, step: int, sample_ids: Sequence[int]) -> list[int]:
    """The rows of the given samples of a step.

    Samples are counted through all steps (`step * batch_size + id`). Every `num_rows` samples are one epoch, which has
    each row once. A batch may have samples of two epochs.

    Args:
        split_seed: determines the permutation, with the epoch's number.
        sample_ids: indices in the global batch, from 0 to batch_size - 1.

    Returns:
        one row from 0 to num_rows - 1 for each of `sample_ids`.
    """
    assert num_rows > 0, "a data set without rows"
    rows = []
    for sample_id in sample_ids:
        assert 0 <= sample_id < batch_size, f"sample {sample_id} of a batch of {batch_size}"
        epoch, place = divmod(step * batch_size + sample_id, num_rows)
        rows.append(int(_permutation(split_seed, epoch, num_rows)[place]))
    return rows


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """A permutation of the rows.

    It sorts Philox's raw output, which is the same in all versions of NumPy; `Generator.permutation` may differ.
    """
    raw = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_rows)
    return np.argsort(raw, kind="stable")
