"""Counts words that readers stumble over in the docstrings, comments, help and error texts of realhf and csrc.

Prints hits per 1,000 words by folder, and with --show every hit of a path. Exits with 1 where all of them together are
above CEILING: write short sentences with the subject first, and call every thing by its name.

Command: python scripts/check_words.py [CHECKOUT] [--show PATH]
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from count_lines import CPP, ROOT, cpp_tokens, docstrings, is_comment, sources
from pygments.token import String

CEILING = 2.3
# A sentence, or the description of an argument, that begins with these lacks a subject.
BEGINNINGS = ("of", "by which", "that of", "has the", "takes note", "the one of", "what", "who")
# They stand for a thing that has a name.
ANYWHERE = (
    "so many", "of which", "such that of", "what is", "the one of", "as far as", "nobody", "whoever", "one who",
    "as it says",
)  # fmt: skip
_BEGINNING = re.compile(rf"(?:{'|'.join(BEGINNINGS)})\b", re.IGNORECASE)
_ANYWHERE = re.compile(rf"\b(?:{'|'.join(ANYWHERE)})\b", re.IGNORECASE)
_SENTENCES = re.compile(r"(?<=[.!?;])\s+|\n\s*\n|^\s*\w+(?:, \w+)*: ", re.MULTILINE)
_LEAST_WORDS = 3  # of a string that is a text


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of docstrings, comments, and strings of several words; X stands for the values in f-strings."""
    tree = ast.parse(source)
    whole = {id(node) for node in docstrings(tree)}
    inside: set[int] = set()
    for node in ast.walk(tree):  # an f-string comes before its parts
        match node:
            case ast.JoinedStr(values=values):
                inside.update(id(value) for value in values)
                text = "".join(str(value.value) if isinstance(value, ast.Constant) else "X" for value in values)
            case ast.Constant(value=str() as text) if id(node) not in inside:
                pass
            case _:
                continue
        if id(node) in whole or len(text.split()) >= _LEAST_WORDS:
            yield node.lineno, text
    comments = [
        (token.start[0], token.string.lstrip("# "), token.line.lstrip().startswith("#"))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    yield from joined(comments)


def cpp_texts(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of comments, and of strings of several words."""
    comments = []
    code_line = 0  # the last one with code
    for line, kind, value in cpp_tokens(source):
        if is_comment(kind):
            comments.append((line, value.strip().strip("/* "), line != code_line))
        elif value.strip():
            code_line = line
            if kind in String and len(value.split()) >= _LEAST_WORDS:
                yield line, value
    yield from joined(comments)


def joined(comments: list[tuple[int, str, bool]]) -> Iterator[tuple[int, str]]:
    """Line and text of comments (line, text, whether it has the line for itself); those of adjacent lines are one."""
    block: list[str] = []
    first = last = 0
    for line, text, is_alone in comments:
        if block and not (is_alone and line == last + 1):
            yield first, " ".join(block)
            block = []
        first = first if block else line
        last = line if is_alone else 0
        block.append(text)
    if block:
        yield first, " ".join(block)


def hits(text: str) -> list[str]:
    """The sentences with a hit, once for each."""
    found = []
    for sentence in (" ".join(part.split()) for part in _SENTENCES.split(text)):
        begins = [0] if _BEGINNING.match(sentence) else []
        found += [sentence] * len({*begins, *(match.start() for match in _ANYWHERE.finditer(sentence))})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="a checkout (default: this one)")
    parser.add_argument("--show", metavar="PATH", help="print the hits in files whose path begins with PATH")
    arguments = parser.parse_args()
    words: defaultdict[str, int] = defaultdict(int)
    found: defaultdict[str, int] = defaultdict(int)
    for path in sources(arguments.root):
        name = path.relative_to(arguments.root)
        folder = "/".join(name.parts[:-1][:2])
        source = path.read_text()
        for line, text in cpp_texts(source) if path.suffix in CPP else python_texts(source):
            words[folder] += len(text.split())
            for sentence in hits(text):
                found[folder] += 1
                if arguments.show is not None and str(name).startswith(arguments.show):
                    print(f"{name}:{line}: {sentence}")
    for folder, count in sorted(words.items()):
        print(f"{1000 * found[folder] / count:6.1f} {folder}")
    rate = 1000 * sum(found.values()) / sum(words.values())
    print(f"{rate:6.2f} together: {sum(found.values())} hits in {sum(words.values()):,} words; at most {CEILING}")
    if rate > CEILING:
        sys.exit("say it in plain words: the subject first, every thing by its name")


if __name__ == "__main__":
    main()
