"""What the papers print: values and settings, from `benchmarks/published/*.yaml`."""

from pathlib import Path

import msgspec

from realhf.base.errors import UserError

FOLDER = Path(__file__).parents[2] / "published"
NEAR = 0.25  # of a published value: further away a value does not reproduce it


class Limit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value of which only a bound is printed."""

    at_most: float | None = None
    at_least: float | None = None

    def holds(self, value: float) -> bool:
        """Whether a value keeps to the bound."""
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)

    @property
    def number(self) -> float:
        """The bound itself."""
        bound = self.at_most if self.at_most is not None else self.at_least
        assert bound is not None
        return bound


def distance(known: float, value: float) -> float:
    """How far a value is from a published one, relative to that; infinite where 0 is published, and another found."""
    return abs(value / known - 1) if known else (0.0 if value == known else float("inf"))


def reproduces(known: float | Limit, value: float) -> bool:
    """Whether a value keeps to a published bound, or is within 25 % of a published value."""
    return known.holds(value) if isinstance(known, Limit) else distance(known, value) <= NEAR


class Figure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table, a figure or a passage of a paper.

    setting: what was measured, and what is assumed here where the paper does not say it.
    values: by case what the paper prints. Cases without a value: drawn only, or not known here.
    says: what the paper says in words.
    derived: the cases of `values` that the paper does not print: computed here from what it prints. They do not count.
    reasons: by case what explains the distance of ours, where it is known.
    why: the same of all of it.
    not_reproduced: why there is nothing of ours.
    pictures: names of SVG files beside the page.

    Raises ValueError for a case in `derived` or `reasons` that has no value.
    """

    id: str
    title: str
    setting: str
    values: dict[str, float | Limit] = {}
    derived: tuple[str, ...] = ()
    reasons: dict[str, str] = {}
    says: str = ""
    why: str = ""
    not_reproduced: str = ""
    pictures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := sorted({*self.derived, *self.reasons} - set(self.values)):
            raise ValueError(f"figure {self.id}: no value of {', '.join(unknown)}; write them as in `values`")


class Paper(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A paper, its testbed and how that is described here, and its figures in the order of the page."""

    name: str
    source: str
    testbed: str
    figures: tuple[Figure, ...]


def load_papers(folder: Path = FOLDER) -> list[Paper]:
    """All papers, in the order of their files' names.

    Raises:
        UserError: a file is not as `Paper` has it, or two figures have one id.
    """
    papers = []
    for path in sorted(folder.glob("*.yaml")):
        try:
            papers.append(msgspec.yaml.decode(path.read_bytes(), type=Paper))
        except msgspec.DecodeError as error:
            raise UserError(f"{path}: {error}; the fields are those of `lib.papers.published.Paper`") from None
    ids = [figure.id for paper in papers for figure in paper.figures]
    if twice := sorted({id for id in ids if ids.count(id) > 1}):
        raise UserError(f"{folder}: figures {', '.join(twice)} occur twice; give each an id of its own")
    return papers
