"""Libraries that the package imports are those that it lists: what comes with another library may go with it."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]


def imported(file: Path) -> set[str]:
    """The first parts of the modules that a file imports, at any place in it."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = [one.name for node in nodes if isinstance(node, ast.Import) for one in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


def test_imported_libraries_are_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = chain(project["dependencies"], *project["optional-dependencies"].values())
    listed = {re.split(r"[\[<>=]", line)[0].lower().replace("_", "-") for line in lines}
    libraries = set().union(*map(imported, (ROOT / "realhf").rglob("*.py"))) - sys.stdlib_module_names - {"realhf"}
    assert len(libraries) > 15
    packages = packages_distributions()
    unlisted = {name for name in libraries if listed.isdisjoint(one.lower() for one in packages.get(name, ()))}
    # Not installed everywhere: these are known by their own names.
    assert {name for name in unlisted if name.replace("_", "-") not in listed} <= {"megatron"}
