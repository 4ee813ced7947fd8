"""What `make test` installs is there: a test that skips without it would drop a comparison without a word."""

import re
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement

TESTS = Path(__file__).parents[1]
SKIPS = re.compile(r"importor" r"skip|except (ImportError|ModuleNotFoundError)")


def test_no_test_is_skipped_for_want_of_a_package() -> None:
    found = [str(path.relative_to(TESTS)) for path in sorted(TESTS.rglob("*.py")) if SKIPS.search(path.read_text())]
    assert not found, "import it plainly; put what is missing into the extra `dev`"


def test_what_tests_compare_with_is_installed_by_the_extra_dev() -> None:
    wanted = [Requirement(line) for line in requires("realhf") or []]
    dev = {one.name: one for one in wanted if one.marker is not None and one.marker.evaluate({"extra": "dev"})}
    for name in ("trl", "transformers", "pyarrow", "datasets", "math-verify", "megatron-core"):
        assert dev[name].specifier.contains(version(name)), name
