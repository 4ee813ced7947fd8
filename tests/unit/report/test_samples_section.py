"""Completions in reports and on terminals: hostile texts, long ones, many of them."""

import json
import unicodedata
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from realhf import cli
from realhf.base.shown import visible
from realhf.report.page import write_report
from realhf.report.sample_texts import LONGEST_NOTE, heading, shortened, with_ends
from realhf.report.samples_section import EARLIER_STEPS, MAX_BYTES, NEWEST_STEPS, chosen_steps, samples_section
from realhf.rewards.details import RewardDetails
from realhf.rundir.paths import RunDirectory
from realhf.rundir.samples import Sample, StepSamples
from tests.unit.report.run_directories import good_run, sample

HOSTILE = '</pre></div><script>alert("1")</script><img src=x onerror="alert(2)">\x1b[2J\u202e&amp; <!-- \x00'


def step_of(step: int, response: str, count: int = 2) -> StepSamples:
    texts = (
        Sample(step=step, sample=i, split="train", prompt="p", response=response, reward=None) for i in range(count)
    )
    return StepSamples(step, "train", tuple(texts))


class Seen(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(str(html))

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_what_a_model_wrote_is_text_and_nothing_else() -> None:
    html = samples_section([step_of(1, HOSTILE)])
    plain = samples_section([step_of(1, "harmless")])
    assert Seen(html).tags == Seen(plain).tags
    assert with_ends(HOSTILE) in Seen(html).text
    assert "<script" not in html
    assert not [c for c in html if c != "\n" and unicodedata.category(c) in ("Cc", "Cf")]


def detailed(**details: Any) -> Sample:
    texts = {"prompt": "p", "response": "r"}
    return Sample(step=1, sample=4, split="train", **texts, reward=0.5, details=RewardDetails(**details))


def test_the_rewards_of_several_functions_and_the_answer_are_shown() -> None:
    sample = detailed(rewards={"right": 0.0, "short": 1.0, "rude": None}, columns={"answer": HOSTILE}, notes={"n": 42})
    assert heading(sample) == "sample 4, reward 0.5 (right 0, short 1, rude none), n 42"
    html = samples_section([StepSamples(1, "train", (sample,))])
    assert f"answer: {with_ends(HOSTILE)}" in Seen(html).text
    assert heading(sample) in Seen(html).text
    assert "<script" not in html
    assert heading(detailed(rewards={"right": 0.5})) == "sample 4, reward 0.5", "of one function it says no more"


def test_long_answers_are_shortened_as_responses_are() -> None:
    steps = [StepSamples(i, "train", (detailed(columns={"answer": "x" * 20_000}),)) for i in range(20)]
    html = samples_section(steps)
    assert len(html.encode()) <= MAX_BYTES
    assert html.count("answer: ") == 20


def test_what_is_noted_of_a_sample_stands_beside_its_reward() -> None:
    noted, plain = detailed(notes={"last number": 42, "note": HOSTILE}), detailed()
    assert heading(noted) == f"sample 4, reward 0.5, last number 42, note {visible(HOSTILE)[: LONGEST_NOTE - 5]}"
    assert heading(plain) == "sample 4, reward 0.5"
    pages = [Seen(samples_section([StepSamples(1, "train", (one,))])) for one in (noted, plain)]
    assert pages[0].tags == pages[1].tags
    assert "last number 42" in pages[0].text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, naïve 文字 👍\nnext", "plain, naïve 文字 👍\nnext"),
        ("\x1b[31mred\x07\r\t", "\\x1b[31mred\\x07\\r\\t"),
        ("abc\u202edef\u2028\u200b\ufeff", "abc\\u202edef\\u2028\\u200b\\ufeff"),
        ("कॆ\u200cक", "कॆ\u200cक"),
        ("end\n\n", "end\\n\\n"),
        ("\U000e0041\ue000", "\\U000e0041\\ue000"),
    ],
)
def test_no_character_acts(text: str, shown: str) -> None:
    assert with_ends(text) == shown


def test_of_a_long_text_beginning_and_end_are_shown() -> None:
    assert shortened("x" * 30, 30) == "x" * 30
    assert shortened("a" * 5000 + "z" * 5000, 30) == "a" * 20 + "\n[... 9,970 characters left out ...]\n" + "z" * 10


def test_the_first_the_newest_and_an_even_spread_are_chosen() -> None:
    steps = [step_of(step, "r") for step in range(1, 1001)]
    assert chosen_steps(steps[:20]) == steps[:20]
    chosen = [each.step for each in chosen_steps(steps)]
    assert chosen == [1 + 99 * i for i in range(EARLIER_STEPS)] + list(range(1000 - NEWEST_STEPS + 1, 1001))
    assert "980 more are in <code>samples.jsonl" in samples_section(steps)


@pytest.mark.parametrize("count", [2, 64, 500])
def test_the_section_stays_small_whatever_a_model_writes(count: int) -> None:
    html = samples_section([step_of(step, "&<\x00" * 20_000, count) for step in range(1, 100)])
    assert len(html.encode()) < MAX_BYTES * (1.1 if count < 500 else 2)
    assert "step 99" in html


def test_a_quote_takes_no_more_room_than_another_character() -> None:
    assert samples_section([step_of(step, '"' * 5000) for step in range(8)]).count('"' * 5000) == 16


def test_the_newest_step_is_shown_first_and_the_others_are_hidden(tmp_path: Path) -> None:
    page = write_report(RunDirectory(good_run(tmp_path / "run"))).read_text()
    assert "<option>step 4</option><option>step 3</option>" in page
    shown, *hidden = page.partition('<div class="chosen">')[2].split("<div hidden>")
    assert "ab4" in shown
    assert "sample 7, reward 0.5" in shown
    assert ["ab3" in hidden[0], "ab2" in hidden[1], "ab1" in hidden[2]] == [True] * 3


def test_a_run_without_samples_has_no_section(tmp_path: Path) -> None:
    assert "<h2>Samples" not in write_report(RunDirectory(good_run(tmp_path / "run", samples=None))).read_text()


def test_the_command_prints_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    details = {"rewards": {"right": 0, "short": 1}, "columns": {"answer": "ab\x1b"}, "notes": {"letters": 2}}
    long = sample(4, 7, response=HOSTILE + "long " * 1000, details=details)
    run = good_run(tmp_path / "run", samples=[sample(1, 5), long])
    assert cli.main(["status", str(run), "--samples"]) == 0
    text = capsys.readouterr().out
    assert text.index("step 1, sample 5, reward 0.5") < text.index("step 4, sample 7")
    assert "\x1b" not in text
    assert "\\x1b[2J\\u202e" in text.replace("\n", "").replace(" ", "")
    assert max(map(len, text.splitlines())) <= 110
    assert "characters left out" in text
    assert "reward 0.5 (right 0, short 1), letters 2" in text
    assert "answer:\n  ab\\x1b " in text
    assert cli.main(["status", str(run), "--samples", "--json"]) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    assert [(one["step"], one["sample"]) for one in samples] == [(1, 5), (4, 7)]
    assert samples[1]["response"].startswith(HOSTILE)
    assert ("details" in samples[0], samples[1]["details"]) == (False, details)


def test_the_command_says_how_to_get_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", str(good_run(tmp_path / "run", samples=None)), "--samples"]) == 0
    assert "has no samples; a run writes those that a call rewards" in " ".join(capsys.readouterr().out.split())
