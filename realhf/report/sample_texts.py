"""Texts of a model as people may read them: no character acts on the reader's terminal or page."""

import unicodedata

from realhf.rundir.samples import Sample

# Control, format, private and unassigned characters, and line separators other than "\n": a terminal obeys some of
# them, and others turn or hide the text around them. Two joiners belong to the spelling of words.
_ACTING = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
_JOINERS = "\u200c\u200d"


def visible(text: str) -> str:
    """The text with every acting character as its escape, such as "\\x1b"; line breaks stay, and the last ones are
    marked, since they could not be seen."""
    shown = "".join(
        character
        if character == "\n" or character in _JOINERS or unicodedata.category(character) not in _ACTING
        else character.encode("unicode_escape").decode()
        for character in text
    )
    body = shown.rstrip("\n")
    return body + "\\n" * (len(shown) - len(body))


def shortened(text: str, limit: int) -> str:
    """At most about `limit` characters: of a longer text its beginning and, half as long, its end."""
    if len(text) <= limit:
        return text
    end = limit // 3
    begin = limit - end
    return f"{text[:begin]}\n[... {len(text) - limit:,} characters left out ...]\n{text[len(text) - end :]}"


def heading(sample: Sample) -> str:
    """Such as "sample 17, reward 0.5"."""
    return f"sample {sample.sample}, reward {'none' if sample.reward is None else f'{sample.reward:.4g}'}"
