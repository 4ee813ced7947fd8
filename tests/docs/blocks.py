"""Reads the project's Markdown files: code blocks, links, file names, table cells."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("**/*.md"))]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_COMMENT = re.compile(r"(^|\s+)# .*$")


@dataclass(frozen=True)
class Document:
    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def prose(self) -> str:
        """The text without code blocks."""
        return _BLOCK.sub("", self.text)

    def blocks(self, language: str) -> list[str]:
        return [body for found, body in _BLOCK.findall(self.text) if found == language]

    @property
    def commands(self) -> list[str]:
        """The commands of its sh blocks, without comments."""
        lines = [line for block in self.blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
        return [command for line in lines if (command := _COMMENT.sub("", line).strip())]

    @property
    def links(self) -> list[str]:
        return [link for link in _LINK.findall(self.prose) if "://" not in link]

    @property
    def code_words(self) -> list[str]:
        """What stands between backticks in the prose."""
        return _CODE.findall(self.prose)

    @property
    def anchors(self) -> set[str]:
        """Of its headings, as GitHub makes them."""
        headings = re.findall(r"^#+ (.+)$", self.prose, re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
