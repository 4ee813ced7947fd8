"""The line of a script that an error comes from."""

import sys
from pathlib import Path

import realhf
from realhf.base.errors import UserError

_HERE = str(Path(__file__).parent)
_EXPERIMENTS = str(Path(realhf.__file__).parent / "experiments")
_PACKAGE = str(Path(realhf.__file__).parent)


def script_line() -> str:
    """FILE:LINE of the innermost frame outside this package, or in its ready experiments."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_EXPERIMENTS) or not (name.startswith((_PACKAGE, "<"))):
            return f"{name}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "the script"


class ScriptError(UserError):
    """An error of a script whose text begins with the line that it comes from."""


def script_error(text: str) -> ScriptError:
    return ScriptError(f"{script_line()}: {text}")
