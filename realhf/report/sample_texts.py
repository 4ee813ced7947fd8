"""Texts of a model as people may read them: no character acts on the reader's terminal or page."""

from realhf.base.shown import visible
from realhf.rundir.samples import Sample

LONGEST_NOTE = 120


def with_ends(text: str) -> str:
    """The text without characters that act (`visible`); its last line breaks, which could not be seen, are marked."""
    shown = visible(text)
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
    """For example "sample 17, reward 0.5"; with notes "sample 17, reward 0.5, last number 42"."""
    head = f"sample {sample.sample}, reward {'none' if sample.reward is None else f'{sample.reward:.4g}'}"
    notes = (f"{name} {value}" for name, value in (sample.notes or {}).items())
    return ", ".join([head, *(visible(" ".join(one.split()))[:LONGEST_NOTE] for one in notes)])
