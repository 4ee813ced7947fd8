"""The section of a report with completions: prompts, responses and rewards of the step that the reader chooses."""

from collections.abc import Sequence
from html import escape

from markupsafe import Markup

from realhf.report.html import part
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
    return _section(chosen, limit, left_out=len(steps) - len(chosen))


def chosen_steps(steps: Sequence[StepSamples]) -> list[StepSamples]:
    """The newest steps, and earlier ones from the first on, evenly over the run."""
    earlier, newest = list(steps[:-NEWEST_STEPS]), list(steps[-NEWEST_STEPS:])
    if len(earlier) > EARLIER_STEPS:
        earlier = [earlier[i * len(earlier) // EARLIER_STEPS] for i in range(EARLIER_STEPS)]
    return earlier + newest


def _is_too_long(steps: Sequence[StepSamples], limit: int) -> bool:
    """Whether the steps take more than `MAX_BYTES` with texts of `limit` characters. Each takes a byte at least: long
    texts are made visible only where their length alone does not tell."""
    texts = (
        text
        for step in steps
        for sample in step.samples
        for text in (sample.prompt, sample.response, *sample.details.columns.values())
    )
    characters = sum(min(len(text), limit) for text in texts)
    return characters > MAX_BYTES or len(_section(steps, limit).encode()) > MAX_BYTES


def _section(steps: Sequence[StepSamples], limit: int, left_out: int = 0) -> Markup:
    def shown(text: str) -> Markup:
        """The text of a `<pre>`, where quotes mean nothing: escaped they would take five times the room."""
        return Markup(escape(with_ends(shortened(text, limit)), quote=False))

    return part("samples.html", steps=steps, shown=shown, title_of=title_of, heading=heading, left_out=left_out)
