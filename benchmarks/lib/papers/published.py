"""What the papers print: values and settings, from `benchmarks/published/*.yaml`."""

from pathlib import Path

import msgspec

from realhf.base.errors import UserError

FOLDER = Path(__file__).parents[2] / "published"


class Limit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value of which only a bound is printed."""

    at_most: float | None = None
    at_least: float | None = None

    def holds(self, value: float) -> bool:
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)

    @property
    def number(self) -> float:
        """The bound itself."""
        bound = self.at_most if self.at_most is not None else self.at_least
        assert bound is not None
        return bound


class Figure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table, a figure or a passage of a paper.

    setting: what was measured, and what is assumed here where the paper does not say it.
    values: by case what the paper prints. Cases without a value: drawn only, or not known here.
    says: what the paper says in words.
    why: what explains the distance of ours, where it is known.
    not_reproduced: why there is nothing of ours.
    pictures: names of SVG files beside the page.
    """

    id: str
    title: str
    setting: str
    values: dict[str, float | Limit] = {}
    says: str = ""
    why: str = ""
    not_reproduced: str = ""
    pictures: tuple[str, ...] = ()


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
