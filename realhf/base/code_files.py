"""Python code by its name: files that a user names (an experiment, a launcher), and commands that run a module."""

import hashlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import SOURCE_SUFFIXES, SourceFileLoader
from pathlib import Path
from traceback import walk_tb
from types import CodeType, ModuleType

from realhf.base.errors import UserError


class _SourceLoader(SourceFileLoader):
    """Compiles the file each time. Bytecode goes by a file's size and the second of its last change: code that was
    changed twice in a second could stay the old one."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


class ProgramBegins(BaseException):
    """`realhf.start` raises it in a process that loads a program for its functions alone: what comes behind is not
    executed."""


loads: list[str] = []  # the files that are being loaded, and how: as "code", or as a "program"


def load_program(path: str | Path, words: Sequence[str] = ()) -> None:
    """Loads the file of a live program up to `realhf.start`; `words` are those of its command line. Raises as
    `load_code_file`."""
    before, sys.argv = sys.argv, [str(path), *words]
    try:
        load_code_file(path, "program")
    except ProgramBegins:
        pass
    finally:
        sys.argv = before


def module_name(file: Path) -> str:
    """The name of a file's module: the dataclass machinery looks classes up in sys.modules, so it is unique."""
    return f"realhf_loaded_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"


def load_code_file(path: str | Path, kind: str = "code") -> ModuleType:
    """The module in a Python file, loaded anew. Modules in the file's folder can be imported from now on.

    Raises UserError if there is no such file, or with the line of an error while importing it.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise UserError(f"{path}: no such file")
    name = module_name(file)
    if file.suffix not in SOURCE_SUFFIXES:
        raise UserError(f"{path}: not a Python file")
    loader = _SourceLoader(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    add_to_search_path(file.parent)
    loads.append(kind)
    try:
        loader.exec_module(module)
    except UserError as error:
        raise UserError(f"{path}{_line_in(file, error)}: {error}") from error
    except Exception as error:
        line = _line_in(file, error)
        raise UserError(f"{path}{line}: cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        loads.pop()
    return module


def add_to_search_path(folder: Path) -> None:
    """Modules in `folder` can be imported, where no other module has their name."""
    if str(folder.resolve()) not in sys.path:
        sys.path.append(str(folder.resolve()))


def python_command(module: str, *words: str) -> tuple[str, ...]:
    """The command line of every Python process that is started: `module` with these words.

    -P keeps the working directory out of `sys.path`, where a file `json.py` would take the place of Python's own.
    Processes that these start in turn (multiprocessing) have -P too.
    """
    return (sys.executable, "-P", "-m", module, *words)


def _line_in(file: Path, error: Exception) -> str:
    """`:LINE` of the deepest place in `file` that `error` came from, or nothing."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f":{error.lineno}"
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == str(file)]
    return f":{lines[-1]}" if lines else ""
