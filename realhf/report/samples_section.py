"""The section of a report with completions: prompts, responses and rewards of the step that the reader chooses."""

from collections.abc import Sequence
from html import escape

from realhf.report.html import section
from realhf.report.sample_texts import heading, shortened, with_ends
from realhf.rundir.samples import StepSamples, title_of

NEWEST_STEPS, EARLIER_STEPS = 10, 10
# The most characters of the whole section, so that a report stays small whatever a model writes.
MAX_BYTES = 96_000
LONGEST_TEXT, SHORTEST_TEXT = 6000, 20


def samples_section(steps: Sequence[StepSamples]) -> str:
    """The section; "" if the run has written no samples. Texts are escaped, and shortened where they are too many."""
    if not steps:
        return ""
    chosen = chosen_steps(steps)
    limit = LONGEST_TEXT
    while _is_too_long(chosen, limit) and limit > SHORTEST_TEXT:
        limit = limit * 2 // 3
    while _is_too_long(chosen, limit) and len(chosen) > 1:  # many samples a step
        chosen = chosen[len(chosen) // 2 :]
    body = _steps(chosen, limit)
    left_out = (
        f"; {len(steps) - len(chosen)} more are in <code>samples.jsonl</code>" if len(chosen) < len(steps) else ""
    )
    note = f"Completions of {len(chosen)} steps and evaluations{left_out}. Control characters stand as escapes."
    options = "".join(f"<option>{escape(title_of(each))}</option>" for each in reversed(chosen))
    return section(
        "Samples",
        f'<p class="muted">{note}</p><p><select class="chooser" aria-label="step">{options}</select></p>{body}',
    )


def chosen_steps(steps: Sequence[StepSamples]) -> list[StepSamples]:
    """The newest steps, and earlier ones from the first on, evenly over the run."""
    earlier, newest = list(steps[:-NEWEST_STEPS]), list(steps[-NEWEST_STEPS:])
    if len(earlier) > EARLIER_STEPS:
        earlier = [earlier[i * len(earlier) // EARLIER_STEPS] for i in range(EARLIER_STEPS)]
    return earlier + newest


def _is_too_long(steps: Sequence[StepSamples], limit: int) -> bool:
    """Whether the steps take more than `MAX_BYTES` with texts of `limit` characters. Each takes a byte at least: long
    texts are made visible only where their length alone does not tell."""
    texts = (text for step in steps for sample in step.samples for text in (sample.prompt, sample.response))
    characters = sum(min(len(text), limit) for text in texts)
    return characters > MAX_BYTES or len(_steps(steps, limit).encode()) > MAX_BYTES


def _steps(steps: Sequence[StepSamples], limit: int) -> str:
    """One after the other, the newest first; the others are hidden until they are chosen."""
    parts = []
    for index, step in enumerate(reversed(steps)):
        samples = "".join(
            f'<div class="sample"><b>{escape(heading(sample))}</b>'
            f'<pre class="prompt">{_text(sample.prompt, limit)}</pre><pre>{_text(sample.response, limit)}</pre></div>'
            for sample in step.samples
        )
        parts.append(f"<div{' hidden' if index else ''}>{samples}</div>")
    return f'<div class="chosen">{"".join(parts)}</div>'


def _text(text: str, limit: int) -> str:
    return escape(with_ends(shortened(text, limit)), quote=False) or '<span class="muted">(empty)</span>'
