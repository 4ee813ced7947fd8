"""Several data sets side by side: a sample has a row of each. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from realhf.api.experiment import DatasetExtent, KeyExtent, KeyLengths
from realhf.base.errors import UserError
from realhf.data.text_dataset import TextDataset


@dataclass(frozen=True, kw_only=True)
class MergedDataset:
    """Data sets whose keys stand side by side (prompts, and texts of pretraining), each in an order of its own.

    Samples of one prompt share a row of the first data set, and have rows of their own in the others.

    Raises:
        UserError: two of them have one key, or different tokenizers.
    """

    parts: tuple[TextDataset, ...]

    def __post_init__(self) -> None:
        for other, part in combinations(self.parts, 2):
            if shared := sorted(set(part.keys) & set(other.keys)):
                raise UserError(
                    f"the data sets {other.path} and {part.path} both make {shared[0]!r}; a sample has a row of each, "
                    "so give data sets of two kinds, such as prompts and examples"
                )
            if part.tokenizer != other.tokenizer:
                raise UserError(
                    f"the data sets {other.path} and {part.path} have the tokenizers {other.tokenizer} and "
                    f"{part.tokenizer}; give them one"
                )

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for part in self.parts for key in part.keys)

    def check(self) -> DatasetExtent:
        """The content; its rows are those of the smallest data set. Raises as `TextDataset.check`."""
        extents = [part.check() for part in self.parts]
        first, *_ = extents
        keys: Mapping[str, KeyExtent] = {key: found for extent in extents for key, found in extent.keys.items()}
        return DatasetExtent(
            path=", ".join(extent.path for extent in extents),
            rows=min(extent.rows for extent in extents),
            keys=keys,
            tokenizer=first.tokenizer,
            largest_token=first.largest_token,
            dropped=sum(extent.dropped for extent in extents),
            truncated=sum(extent.truncated for extent in extents),
            columns=first.columns,
            first=first.first,
            nulls=first.nulls,
        )

    def lengths(self) -> dict[str, KeyLengths]:
        """As `TextDataset.lengths`."""
        return {key: found for part in self.parts for key, found in part.lengths().items()}

    def describe(self) -> str:
        """As `TextDataset.describe`, a line a data set."""
        return "\n".join(part.describe() for part in self.parts)
