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
    """For example "sample 17, reward 0.5"; of several functions and with a note "sample 17, reward 0.5 (right 0,
    short 1), last number 42"."""
    details = sample.details
    parts = ", ".join(f"{visible(name)} {_value(value)}" for name, value in details.rewards.items())
    reward = f"reward {_value(sample.reward)}" + (f" ({parts})" if len(details.rewards) > 1 else "")
    notes = (f"{name} {value}" for name, value in details.notes.items())
    return ", ".join(
        [f"sample {sample.sample}", reward, *(visible(" ".join(one.split()))[:LONGEST_NOTE] for one in notes)]
    )


def _value(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:.4g}"
