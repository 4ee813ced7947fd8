"""The line of a script that an error comes from."""

import sys
import traceback
from pathlib import Path

import realhf
from realhf.base.errors import UserError

_PACKAGE = str(Path(realhf.__file__).parent)
_EXPERIMENTS = str(Path(realhf.__file__).parent / "experiments")


def script_line() -> str:
    """FILE:LINE of the innermost frame outside this package, or in its ready experiments."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        name = frame.f_code.co_filename
        if name.startswith(_EXPERIMENTS) or not name.startswith((_PACKAGE, "<")):
            return f"{name}:{line}"
    return "the script"


class ScriptError(UserError):
    """An error of a script whose text begins with the line that it comes from."""


def script_error(text: str) -> ScriptError:
    return ScriptError(f"{script_line()}: {text}")
