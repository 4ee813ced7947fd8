"""The i-th row of a data set in step t: a new permutation every epoch, the same on every worker."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np


def row_of(split_seed: int, num_rows: int, rows_per_step: int, step: int, places: Sequence[int]) -> list[int]:
    """The rows at the given places of a step.

    Places are counted through all steps (`step * rows_per_step + place`). Every `num_rows` places are one epoch, which
    has each row once. A step may have rows of two epochs.

    Args:
        split_seed: determines the permutation, with the epoch's number.
        places: from 0 to rows_per_step - 1; with one sample a row the samples' ids.

    Returns:
        one row from 0 to num_rows - 1 for each of `places`.
    """
    assert num_rows > 0, "a data set without rows"
    rows = []
    for place in places:
        assert 0 <= place < rows_per_step, f"place {place} of a step of {rows_per_step} rows"
        epoch, in_epoch = divmod(step * rows_per_step + place, num_rows)
        rows.append(int(_permutation(split_seed, epoch, num_rows)[in_epoch]))
    return rows


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """A permutation of the rows.

    It sorts Philox's raw output, which is the same in all versions of NumPy; `Generator.permutation` may differ.
    """
    raw = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_rows)
    return np.argsort(raw, kind="stable")
