"""An interface's implementation is looked for before a run starts, and not imported."""

import re
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from realhf.api.errors import UserError
from realhf.api.interface import InterfaceConfig, check_implementation


def implemented_in(place: str) -> InterfaceConfig:
    class Mine(InterfaceConfig):
        implementation: ClassVar[str] = place

    return Mine()


def test_a_module_that_is_there_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_it.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    check_implementation("m_inference", implemented_in("beside_it:Mine"))
    assert "beside_it" not in sys.modules


@pytest.mark.parametrize("module", ["no_such_module", "no_such_package.mine", "realhf.no_such_module"])
def test_a_module_that_is_not_there(module: str) -> None:
    message = (
        f"m_inference: Mine is implemented in a module {module!r}, which is not there; put the file "
        f"{module.split('.')[-1]}.py beside the experiment's, or install the package"
    )
    with pytest.raises(UserError, match=re.escape(message)):
        check_implementation("m_inference", implemented_in(f"{module}:Mine"))


@pytest.mark.parametrize("place", ["", "module", "module:", ":Class"])
def test_a_place_without_module_or_class(place: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"m_inference: Mine has implementation={place!r}; give it")):
        check_implementation("m_inference", implemented_in(place))


def test_an_interface_without_a_place() -> None:
    with pytest.raises(UserError, match="m_inference: InterfaceConfig has implementation=None; give it"):
        check_implementation("m_inference", InterfaceConfig())
