"""Samples of a step as tokens, read from a data set's file; no torch here."""

from collections import OrderedDict
from collections.abc import Sequence

from realhf.data.datasets import JSONLDataset, Tokens
from realhf.data.row_order import row_of

# More steps than most runs have in flight; rows of other steps are tokenised again.
KEPT_STEPS = 4


class DatasetRows:
    """Samples of any step, in any order.

    Rows are tokenised at first use. The rows of the last few steps are kept for the calls of a step, but not those of
    the whole data set, which may not fit into memory.

    Args:
        seed: determines the order of the rows, which differs in every epoch; None takes the rows in the order of the
            file, once (evaluation).
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
        self._rows: OrderedDict[int, dict[str, Tokens]] = OrderedDict()  # the most recently used last

    @property
    def num_rows(self) -> int:
        return len(self._lines)

    def tokens(self, step: int, sample_ids: Sequence[int]) -> list[dict[str, Tokens]]:
        """By key the tokens of the samples `sample_ids` (indices in the global batch) of a step.

        Raises:
            UserError: a line that the data set's `check` would have refused.
        """
        if self.seed is None:
            rows = [step * self.batch_size + sample_id for sample_id in sample_ids]
            assert all(row < self.num_rows for row in rows), f"rows {rows} of {self.num_rows}"
        else:
            rows = row_of(self.seed, self.num_rows, self.batch_size, step, sample_ids)
        return [self._row(row) for row in rows]

    def lengths(self, step: int, keys: Sequence[str]) -> dict[int, int]:
        """Tokens of every sample of a step, all `keys` together. Raises as `tokens` does."""
        samples = self.tokens(step, range(self.batch_size))
        return {sample_id: sum(len(sample[key]) for key in keys) for sample_id, sample in enumerate(samples)}

    def _row(self, row: int) -> dict[str, Tokens]:
        if row not in self._rows:
            self._rows[row] = self.dataset.encode(self._lines[row], row + 1, self._encoder)
        self._rows.move_to_end(row)
        while len(self._rows) > KEPT_STEPS * self.batch_size:
            self._rows.popitem(last=False)
        return self._rows[row]
