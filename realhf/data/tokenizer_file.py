"""A tokenizer.json from outside. It is checked before the library gets it, since some files never end."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from realhf.base.errors import UserError
from realhf.base.files import BadContentError, decode_loose_json, read_bytes

_REMEDY = "give a tokenizer.json of Hugging Face's tokenizers"
# Those of published tokenizers have at most two in an alternative. A text of n characters can take n to this power.
_MAX_UNBOUNDED = 3
_MAX_REPEATS = 1000
# The library makes a table of as many entries as the largest id says; the largest vocabularies have 300,000.
_MAX_ID = 2**24
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d*)(,?)(\d*)\})[?+]?")
_GROUP = re.compile(r"\?(?:[imx]*(?:-[imx]+)?:|[imx]+(?:-[imx]+)?(?=\))|<?[=!]|>|<\w+>)")
_ESCAPED = re.compile(r"\\[pPxuo]\{[^}]*\}|\\.?", re.DOTALL)


class TokenizerError(Exception):
    """The library has given up; the text is the library's."""


@contextmanager
def no_panic() -> Iterator[None]:
    """Inside, the library's panics, which no `except Exception` meets, are TokenizerErrors."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise TokenizerError(str(error)) from None


def load_tokenizer(path: Path) -> Any:
    """The library's tokenizer of a tokenizer.json. Raises UserError where there is none in it, or where a pattern may
    look at a text without end."""
    try:
        content = read_bytes(path)
        values = decode_loose_json(content)
        named = list(_named(values))
        if (largest := max(_ids(named), default=0)) > _MAX_ID:
            raise UserError(f"tokenizer {path}: the token id {largest} is above {_MAX_ID}; {_REMEDY}")
        for pattern in (part for name, part in named if name == "Regex" and isinstance(part, str)):
            if reason := why_without_end(pattern):
                raise UserError(
                    f"tokenizer {path}: the pattern {pattern[:80]!r} {reason}, so a short text can take it forever; "
                    "give a tokenizer whose patterns repeat single characters and classes of them"
                )
        with no_panic():
            tokenizer = Tokenizer.from_buffer(content)
            tokenizer.no_padding()  # a file may ask for either
            tokenizer.no_truncation()
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"tokenizer {path}: cannot be read ({error.strerror}); {_REMEDY}") from None
    except BadContentError as error:
        raise UserError(f"tokenizer {path}: not JSON ({error}); {_REMEDY}") from None
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"tokenizer {path}: {error}; {_REMEDY}") from None
    return tokenizer


def _named(value: Any) -> Iterator[tuple[str, Any]]:
    """Everything with a name within the values of a tokenizer.json, but for the tokens of a vocabulary."""
    for part in value if isinstance(value, list) else ():
        yield from _named(part)
    for name, part in value.items() if isinstance(value, dict) else ():
        yield name, part
        if name != "vocab":  # has a hundred thousand entries
            yield from _named(part)


def _ids(named: list[tuple[str, Any]]) -> Iterator[int]:
    """Every id of a token."""
    for name, part in named:
        found = part.values() if name == "vocab" and isinstance(part, dict) else [part] if name == "id" else ()
        yield from (each for each in found if isinstance(each, int))


@dataclass
class _Group:
    """An open group: whether it matches one text in several ways, and how many repetitions without a bound its present
    alternative has, and had most."""

    varies: bool = False
    unbounded: int = 0
    most: int = 0
    atom: "_Group | None" = None  # the group that has just ended, which may be repeated

    def end_alternative(self) -> None:
        self.most, self.unbounded = max(self.most, self.unbounded), 0


def why_without_end(pattern: str) -> str:
    """Why a backtracking matcher may take a pattern too long: in words, "" for one that it goes through quickly."""
    groups, at = [_Group()], 0
    while at < len(pattern):
        group, rest = groups[-1], pattern[at:]
        if found := _QUANTIFIER.match(rest):
            if reason := _repeat(group, found):
                return reason
            at += found.end()
        elif rest[0] == "\\":
            if (rest[1:2].isdigit() and rest[1] != "0") or rest[1:2] in ("k", "g"):
                return "refers back to what it has matched"
            step = _ESCAPED.match(rest)
            assert step is not None
            group.atom, at = None, at + step.end()
        elif rest[0] == "[":
            group.atom, at = None, _end_of_class(pattern, at)
        elif rest[0] == "(":
            groups.append(_Group())
            opening = _GROUP.match(rest[1:])
            at += 1 + (opening.end() if opening else 0)
        elif rest[0] == ")" and len(groups) > 1:
            ended = groups.pop()
            ended.end_alternative()
            groups[-1].atom = ended
            groups[-1].unbounded += ended.most
            groups[-1].varies |= ended.varies
            at += 1
        elif rest[0] == "|":
            group.varies, group.atom, at = True, None, at + 1
            group.end_alternative()
        else:
            group.atom, at = None, at + 1
        if groups[-1].unbounded > _MAX_UNBOUNDED:
            return f"repeats more than {_MAX_UNBOUNDED} parts in a row without a bound"
    return ""


def _repeat(group: _Group, found: "re.Match[str]") -> str:
    """Notes a quantifier behind the last atom of a group; a reason if it may take too long."""
    low, comma, high = found[1], found[2], found[3]
    if found[0][0] == "{":
        least = int(low or 0)
        most = None if comma and not high else int(high or low or 0)
    else:
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[found[0][0]]
    if max(least, most or 0) > _MAX_REPEATS:
        return f"repeats a part more than {_MAX_REPEATS} times"
    atom, group.atom = group.atom, None
    if atom is not None and atom.varies and (most is None or most > 1):
        return "repeats a group that matches one text in several ways"
    group.varies |= most != least
    group.unbounded += most is None
    return ""


def _end_of_class(pattern: str, at: int) -> int:
    """The place behind a class that begins at `at`; classes may lie in classes."""
    depth = 0
    while at < len(pattern):
        depth += {"[": 1, "]": -1}.get(pattern[at], 0)
        at += 2 if pattern[at] == "\\" else 1
        if depth == 0:
            break
    return at
