"""An interface's implementation is looked for before a run starts, and not imported."""

import re
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from experiments.ppo import PPOExperiment
from experiments.reward import RewardExperiment
from experiments.sft import SFTExperiment
from realhf.base.errors import UserError
from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.dataflow.interface import InterfaceConfig, check_implementation


def implemented_in(place: str) -> InterfaceConfig:
    class Mine(InterfaceConfig):
        implementation: ClassVar[str] = place

    return Mine()


MINE = """
class Mine:
    def inference(self, model, batch, context): ...
"""

# Where the source does not say it, the workers find out.
LIKE_IT = {
    "in a condition": "if True:\n    class Mine:\n        def train_step(self): ...",
    "imported": "from elsewhere import Mine",
    "imported under the name": "import elsewhere as Mine",
    "anything is imported": "from elsewhere import *",
    "names on demand": "def __getattr__(name): ...",
    "made by a call": "Mine = make()",
    "put in": "globals()['Mine'] = make()",
    "a method of a base": "class Base:\n    def inference(self): ...\nclass Mine(Base): ...",
    "a base from elsewhere": "from elsewhere import Base\nclass Mine(Base): ...",
    "a base in a package": "import elsewhere\nclass Mine(elsewhere.Base): ...",
    "a method by another name": "class Mine:\n    def f(self): ...\n    inference = f",
    "a method that is put in": "class Mine: ...\nMine.inference = make()",
    "a decorator": "@complete\nclass Mine: ...",
    "a metaclass": "class Mine(metaclass=Complete): ...",
}


@pytest.mark.parametrize("source", LIKE_IT.values(), ids=LIKE_IT.keys())
def test_a_class_that_may_be_there(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "perhaps.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    check_implementation("m_inference", implemented_in("perhaps:Mine"), "inference")


@pytest.mark.parametrize(
    ("place", "method", "source", "text"),
    [
        (
            "faulty:Min",
            "inference",
            MINE + "class Other: ...\n",
            "m_inference: Mine is implemented by 'Min' in {file}, which has no such class; it has Mine, Other; correct "
            "Mine.implementation",
        ),
        ("faulty:Mine", "inference", "x = 1", "'Mine' in {file}, which has no such class; it has none; correct"),
        (
            "faulty:Mine",
            "generate",
            MINE,
            "m_inference: Mine in {file} has no method generate, which the call's interface_type needs; define it",
        ),
        (
            "faulty:Mine",
            "inference",
            "class Mine\n    x = 1",
            "{file}:1: cannot be imported: SyntaxError: expected ':'",
        ),
        ("faulty:Mine", "inference", "\0", "{file}"),
    ],
)
def test_a_class_or_method_that_is_not_there(
    place: str, method: str, source: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=re.escape(text.format(file=tmp_path / "faulty.py"))):
        check_implementation("m_inference", implemented_in(place), method)


@pytest.mark.parametrize(
    "call", [*PPOExperiment().rpcs, *RewardExperiment().rpcs, *SFTExperiment().rpcs], ids=lambda call: call.name
)
def test_the_ready_interfaces(call: ModelFunctionCallDef) -> None:
    check_implementation(call.name, call.interface_impl, call.interface_type.value)


def test_a_module_that_is_there_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_it.py").write_text("raise AssertionError('imported')\n" + MINE)
    monkeypatch.syspath_prepend(tmp_path)
    check_implementation("m_inference", implemented_in("beside_it:Mine"), "inference")
    assert "beside_it" not in sys.modules


@pytest.mark.parametrize("module", ["no_such_module", "no_such_package.mine", "realhf.no_such_module"])
def test_a_module_that_is_not_there(module: str) -> None:
    message = (
        f"m_inference: Mine is implemented in a module {module!r}, which is not there; put the file "
        f"{module.split('.')[-1]}.py beside the experiment's, or install the package"
    )
    with pytest.raises(UserError, match=re.escape(message)):
        check_implementation("m_inference", implemented_in(f"{module}:Mine"), "inference")


@pytest.mark.parametrize("place", ["", "module", "module:", ":Class"])
def test_a_place_without_module_or_class(place: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"m_inference: Mine has implementation={place!r}; give it")):
        check_implementation("m_inference", implemented_in(place), "inference")


def test_an_interface_without_a_place() -> None:
    with pytest.raises(UserError, match="m_inference: InterfaceConfig has implementation=None; give it"):
        check_implementation("m_inference", InterfaceConfig(), "inference")


def test_modules_that_are_no_files_of_source_are_left_to_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is compiled, and a folder whose parts may be anywhere."""
    (tmp_path / "parts_of_it").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("math", "sys", "parts_of_it"):
        check_implementation("m_inference", implemented_in(f"{module}:Mine"), "inference")


def test_what_an_interface_does_once_unless_it_says_otherwise() -> None:
    config = implemented_in("mine:Mine")
    assert (config.epochs, config.samples_per_prompt, config.processes_per_worker) == (1, 1, 1)
    assert (config.seconds_per_sample, config.read_files, config.recordable, config.sequence_keys) == (0.0, (), (), ())
    assert (config.uses_model, config.runs_beside) == (True, False)
