"""Planning problems as files, read and checked, in either version of the format."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from realhf.base.errors import UserError
from realhf.base.files import BadContentError, decode_json
from realhf.planning.problem import version_1, version_2
from realhf.planning.problem.tables import Problem


class _Header(msgspec.Struct):
    format: str


def load_problem(path: Path | str) -> Problem:
    """Reads and checks a problem.

    Raises:
        UserError: the file cannot be read, or breaks the format; names the file and the field.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name a planning-problem/1 file") from error
    try:
        if decode_json(data, _Header).format == "planning-problem/2":
            planned = decode_json(data, version_2.PlannedFile)
            _refuse(path, version_2.complaints(planned))
            return version_2.problem_of(planned)
        simple = decode_json(data, version_1.ProblemFile)
        _refuse(path, version_1.complaints(simple))
        return version_1.problem_of(simple)
    except BadContentError as error:  # wrong types and numbers, too
        raise UserError(f"{path}: {error}; the file must have the format planning-problem/1 or /2") from error


def problem_bytes(file: version_1.ProblemFile | version_2.PlannedFile) -> bytes:
    """The content of a problem's file."""
    return msgspec.json.encode(file) + b"\n"


def _refuse(path: Path | str, complaints: Iterator[str]) -> None:
    for complaint in complaints:
        raise UserError(f"{path}: {complaint}")
