"""Samples of a step as tokens, read from a data set's file; no torch here."""

from collections import OrderedDict
from collections.abc import Sequence

from realhf.api.experiment import Dataset
from realhf.data.files.rows import Record
from realhf.data.merged import MergedDataset
from realhf.data.row_order import row_of
from realhf.data.text_dataset import TextDataset
from realhf.data.tokenizer import Tokens
from realhf.dataflow.splits import Split
from realhf.rundir.run import Run

# More steps than most runs have in flight; rows of other steps are tokenised again.
_KEPT_STEPS = 4


class DatasetRows:
    """Samples of any step, in any order. In a `MergedDataset`, rows and records are those of its first part.

    Rows are tokenised at first use. The rows of the last few steps are kept for the calls of a step, but not those of
    the whole data set, which may not fit into memory.

    Args:
        seed: determines the order of the rows, which differs in every epoch; None takes the rows in the order of the
            file, once (evaluation).
        batch_size: samples a step, over all workers; in the order of the file, the most.
        samples_per_prompt: samples that share a row: those of a step are numbered so that neighbours do. A step takes
            batch_size / samples_per_prompt rows.

    Raises:
        UserError: the file cannot be read.
    """

    def __init__(self, dataset: Dataset, seed: int | None, batch_size: int, samples_per_prompt: int = 1):
        assert isinstance(dataset, TextDataset | MergedDataset), "there are no other rows"
        first, *others = dataset.parts
        self._others = [
            DatasetRows(other, None if seed is None else seed + number, batch_size)
            for number, other in enumerate(others, 1)
        ]
        assert batch_size % samples_per_prompt == 0, "checked by `DataflowGraph.rows_per_step`"
        self.seed = seed
        self.batch_size = batch_size
        self.samples_per_prompt = samples_per_prompt
        self.rows_per_step = batch_size // samples_per_prompt
        self._opened = first.open()
        self._kept = first.kept_rows()
        self._rows: OrderedDict[int, dict[str, Tokens]] = OrderedDict()  # the most recently used last

    @property
    def num_rows(self) -> int:
        return len(self._opened.file) if self._kept is None else len(self._kept)

    @property
    def batches(self) -> int:
        """Steps that take each row once."""
        return -(-self.num_rows // self.rows_per_step)

    def samples(self, step: int) -> int:
        """The samples of a step. In the order of the file the last batch is no smaller than the others by more than a
        row, so that each device has a part of it."""
        if self.seed is not None:
            return self.batch_size
        return (self._first(step + 1) - self._first(step)) * self.samples_per_prompt

    def first_sample(self, step: int) -> int:
        """The place of a batch's first sample among those of all batches; 0 for a step of training."""
        return 0 if self.seed is not None else self._first(step) * self.samples_per_prompt

    def _first(self, step: int) -> int:
        return self.num_rows * step // self.batches

    def tokens(self, step: int, sample_ids: Sequence[int]) -> list[dict[str, Tokens]]:
        """By key the tokens of the samples `sample_ids` (indices in the global batch) of a step.

        Raises:
            UserError: a line that the data set's `check` would have refused.
        """
        own = [self._row(row) for row in self.rows(step, sample_ids)]
        others = [other.tokens(step, sample_ids) for other in self._others]
        return [
            {key: tokens for part in parts for key, tokens in part.items()} for parts in zip(own, *others, strict=True)
        ]

    def rows(self, step: int, sample_ids: Sequence[int]) -> list[int]:
        """The row of each of the samples `sample_ids` of a step, from 0 on among the rows that are not left out."""
        places = [sample_id // self.samples_per_prompt for sample_id in sample_ids]
        if self.seed is not None:
            return row_of(self.seed, self.num_rows, self.rows_per_step, step, places)
        assert step < self.batches, f"batch {step} of {self.batches}"
        return [self._first(step) + place for place in places]

    def records(self, step: int, sample_ids: Sequence[int]) -> list[Record]:
        """The rows of samples as the file has them, with all columns, for reward functions.

        Raises:
            UserError: as `tokens`.
        """
        return [self._opened.file.row(self._place(row)) for row in self.rows(step, sample_ids)]

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens by the data set's tokenizer, with special tokens."""
        return self._opened.tokenizer.decode(tokens, skip_special=False)

    def lengths(self, step: int, keys: Sequence[str]) -> dict[int, int]:
        """Tokens of every sample of a step, all `keys` together. Raises as `tokens` does."""
        samples = self.tokens(step, range(self.samples(step)))
        return {sample_id: sum(len(sample[key]) for key in keys) for sample_id, sample in enumerate(samples)}

    def _row(self, row: int) -> dict[str, Tokens]:
        if row not in self._rows:
            self._rows[row] = self._opened.row(self._place(row))
        self._rows.move_to_end(row)
        while len(self._rows) > _KEPT_STEPS * self.rows_per_step:
            self._rows.popitem(last=False)
        return self._rows[row]

    def _place(self, row: int) -> int:
        """The row of the file."""
        return row if self._kept is None else int(self._kept[row])


def rows_of(run: Run, split: Split) -> DatasetRows:
    """The rows of a run's data set of this split. Raises UserError where its file cannot be read."""
    data = run.experiment if split == "train" else run.experiment.evaluations[split]
    seed = run.experiment.seed if split == "train" else None
    return DatasetRows(data.dataset, seed, run.batch_size(split), run.experiment.graphs[split].samples_per_prompt)
