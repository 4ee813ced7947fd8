"""The report in a real browser: everything is drawn, nothing is fetched, nothing lies over anything."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from realhf.report.page import write_report
from realhf.rundir.paths import RunDirectory
from tests.unit.report.run_directories import good_run, metrics_line, sample
from tests.waiting import PATIENCE_S

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --enable-logging=stderr --virtual-time-budget=5000 "
    "--window-size=1280,2400 --dump-dom"
)

# Written into a copy of the page: what only a browser knows, left in an attribute for the test to read.
MEASURE = """<script>addEventListener("load", () => setTimeout(() => {
  const box = e => e.getBoundingClientRect(), texts = [...document.querySelectorAll(".js-plotly-plot text")];
  const seen = texts.filter(t => t.textContent && box(t).width && getComputedStyle(t).opacity > 0
                                 && !t.closest(".hoverlayer")
                                 && new DOMMatrix(getComputedStyle(t).transform).a !== 0);
  const over = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
                      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
  const overlaps = seen.flatMap((a, i) => seen.slice(i + 1).filter(b => over(box(a), box(b)))
                                               .map(b => a.textContent + " / " + b.textContent));
  document.body.setAttribute("data-measured", JSON.stringify({
    overflow_px: document.documentElement.scrollWidth - innerWidth, texts: seen.length, overlaps,
    outside: seen.filter(t => box(t).right > innerWidth || box(t).left < 0).map(t => t.textContent)}));
}, 500))</script>"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is not None:
        return found
    text = "no browser found; on Debian install one with: apt-get install chromium"
    if os.environ.get("REALHF_REQUIRE_CHROMIUM") == "1":
        pytest.fail(text)
    pytest.skip(text)


def rendered(browser: str, page: Path, profile: Path) -> tuple[str, str]:
    """The DOM after its scripts ran, and what the browser logged."""
    argv = [browser, *OPTIONS.split(), f"--user-data-dir={profile}", page.as_uri()]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return result.stdout, result.stderr


def test_the_report_is_drawn(browser: str, tmp_path: Path) -> None:
    report = write_report(RunDirectory(good_run(tmp_path / "run")))
    copy = tmp_path / "measured.html"
    copy.write_text(report.read_text().replace("</body>", MEASURE + "</body>"))
    dom, log = rendered(browser, copy, tmp_path / "profile")
    complaints = [line for line in log.splitlines() if "CONSOLE" in line]
    assert not complaints

    drawn = re.sub(r"<(script|style)\b.*?</\1>", "", dom, flags=re.DOTALL)
    sections = dict(re.findall(r"<section><h2>(.*?)</h2>(.*?)</section>", drawn, flags=re.DOTALL))
    assert sections.keys() >= {"Metrics", "Predicted against measured time", "Timeline of steps 3 and 4"}
    shown, _, folded = sections["Metrics"].partition("<details>")
    # evaluation, reward_mean, kl, actor_loss, entropy, tokens_per_s
    assert shown.count('class="scatterlayer mlayer"') == 6
    assert shown.count('class="js-line"') == 6
    assert not folded
    bars = re.findall(r'class="point"', sections["Predicted against measured time"])
    assert len(bars) == 6  # three calls, measured and predicted, one of them without a height
    timeline = sections["Timeline of steps 3 and 4"]
    for legend in ("compute 70.7%", "reallocation 13.3%", "transfer 2.7%", "waiting 13.3%"):
        assert legend in timeline
    # Worker 0 has 8 segments; worker 1 has 5 a step and waits once.
    assert len(re.findall(r'class="point"', timeline)) == 8 + 11

    memory = sections["Memory of the workers"]
    assert len(re.findall(r'class="point"', memory)) == 6  # two workers, measured and twice predicted
    for label in ("400 MiB, 50% of the limit", "204 MiB, 26% of the limit", "300 MiB, 38%", "limit 800 MiB"):
        assert label in memory

    measured = json.loads(re.search(r'data-measured="(.*?)"', dom)[1].replace("&quot;", '"'))
    assert "sample 7, reward 0.5" in sections["Samples"]
    assert "0.25" in sections["Evaluations"]
    assert measured["texts"] > 50
    assert measured["overflow_px"] <= 0
    assert measured["outside"] == []
    assert measured["overlaps"] == []


HOSTILE = (
    "</pre></script><script>document.title = 'stolen'</script><img src=x onerror=\"document.title = 'stolen'\">"
    "<svg onload=\"document.title='stolen'\"><a href=\"javascript:document.title='stolen'\">x</a>\u202e\x00"
)
CHOOSE = """<script>addEventListener("load", () => setTimeout(() => {
  const select = document.querySelector("select.chooser"), parts = [...document.querySelector(".chosen").children];
  const seen = () => parts.filter(part => part.getBoundingClientRect().height).map(part => part.textContent);
  const before = seen();
  select.selectedIndex = 2;
  select.dispatchEvent(new Event("input", {bubbles: true}));
  document.body.setAttribute("data-chosen", JSON.stringify([before, seen(), document.title]));
}, 500))</script>"""


def test_the_reader_chooses_a_step_and_no_text_of_a_model_acts(browser: str, tmp_path: Path) -> None:
    """The hostile text stands in prompts, responses and the names of statistics."""
    samples = [sample(step, prompt=f"{step}{HOSTILE}", response=HOSTILE) for step in (1, 2, 3)]
    metrics = [metrics_line(step, **{f"kl{HOSTILE}": 1.0, "reward": step / 4}) for step in (1, 2, 3)]
    evaluations = [{"step": 3, f"accuracy{HOSTILE}": 1.0}]
    run = good_run(tmp_path / "run", samples=samples, metrics=metrics, evaluations=evaluations)
    page = write_report(RunDirectory(run))
    copy = tmp_path / "chosen.html"
    head, _, tail = page.read_text().rpartition("</body>")
    copy.write_text(f"{head}{CHOOSE}</body>{tail}")
    dom, _ = rendered(browser, copy, tmp_path / "profile")
    content = html.unescape(re.search(r'data-chosen="(.*?)"', dom)[1])
    before, after, title = json.loads(content)
    shown = HOSTILE.replace("\u202e", "\\u202e").replace("\x00", "\\x00")
    assert before == [f"sample 0, reward 0.53{shown}{shown}"], "the newest step, as text"
    assert after == [f"sample 0, reward 0.51{shown}{shown}"], "the step that was chosen"
    assert title == "run: finished"
    drawn = re.sub(r"<(script|style)\b.*?</\1>", "", dom, flags=re.DOTALL)
    assert "<img" not in drawn
    assert "javascript:document" not in re.sub(r"&lt;a .*?&gt;", "", drawn)
