"""`realhf.osdp` is there without torch until it is used."""

import subprocess
import sys

import pytest

import realhf


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, realhf; assert 'torch' not in sys.modules; realhf.osdp; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'realhf' has no attribute 'osdb'"):
        realhf.osdb  # noqa: B018
