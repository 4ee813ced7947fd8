"""The ready experiments: an algorithm a file, each a script of a few lines that people copy and edit.

`realhf run NAME` takes the file of that name (`ppo-ptx`: ppo_ptx.py); `realhf run --list` shows all of them.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

NEEDS = "Needs:"  # begins the paragraph of a file's docstring that says which options a run cannot do without


@dataclass(frozen=True)
class ReadyExperiment:
    """summary: what it trains, in a line. needs: the options that a run cannot do without, and the data's columns."""

    name: str
    path: Path
    summary: str
    needs: str


def ready_file(name: str) -> Path | None:
    """The file of a ready experiment; None: there is none of this name."""
    path = Path(__file__).parent / f"{name.replace('++', '_plus_plus').replace('-', '_')}.py"
    return path if name and "/" not in name and not name.startswith("_") and path.is_file() else None


def ready_experiments() -> list[ReadyExperiment]:
    """All of them, by name. Their files are read and not imported."""
    files = sorted(path for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("_"))
    return [_described(path) for path in files]


def _described(path: Path) -> ReadyExperiment:
    summary, *paragraphs = (ast.get_docstring(ast.parse(path.read_bytes())) or "").split("\n\n")
    needs = next((text for text in paragraphs if text.startswith(NEEDS)), "")
    name = path.stem.replace("_plus_plus", "++").replace("_", "-")
    return ReadyExperiment(name, path, " ".join(summary.split()), " ".join(needs.removeprefix(NEEDS).split()))
