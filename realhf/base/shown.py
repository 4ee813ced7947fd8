"""Texts from outside as people may read them: no character acts on the reader's terminal or page."""

import unicodedata

# Control, format, private and unassigned characters, and line separators other than "\n": a terminal obeys some of
# them, and others turn or hide the text around them. Two joiners belong to the spelling of words.
_ACTING = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
_KEPT = "\n\u200c\u200d"


def visible(text: str) -> str:
    """The text with every acting character as its escape, such as "\\x1b"; line breaks stay."""
    if text.replace("\n", "").isprintable():  # nearly all are
        return text
    return "".join(
        character
        if character in _KEPT or unicodedata.category(character) not in _ACTING
        else character.encode("unicode_escape").decode()
        for character in text
    )
