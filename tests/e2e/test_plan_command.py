"""`realhf plan` for 128 devices as a user types it, and its page in a real browser."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_report_in_browser import BROWSERS, MEASURE, rendered
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
WORDS = "experiments/ppo.py --cluster h100-16x8 --actor llama3-70b --critic llama3-7b --compare"


def realhf_plan(words: list[str], folder: Path) -> str:
    """What the command prints, run without torch in an otherwise empty folder."""
    code = (
        f"import sys; from realhf.cli import main; code = main(['plan', *{words!r}])\n"
        "assert 'torch' not in sys.modules, 'torch was imported'; sys.exit(code)"
    )
    shutil.copytree(ROOT / "experiments", folder / "experiments", dirs_exist_ok=True)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_128_devices_are_compared(tmp_path: Path) -> None:
    printed = realhf_plan([*WORDS.split(), "--json", "out.json"], tmp_path)
    assert "16 x 8 h100" in printed
    content = json.loads((tmp_path / "out.json").read_bytes())
    plans = {plan["name"]: plan for plan in content["plans"]}
    rules = ["heuristic", "real-heuristic", "colocate", "split", "standalone", "hybridflow", "mapping"]
    assert list(plans) == ["searched", *rules]
    feasible = [plan["step_s"] for plan in plans.values() if plan["feasible"]]
    assert len(feasible) >= 5
    # The search sees all of these plans; what its budget leaves on the table is small.
    assert plans["searched"]["step_s"] <= min(feasible) * 1.03
    assert content["certificate"]["lower_bound_s"] <= min(feasible)
    assert len(content["alternatives"]) == 6
    assert not (tmp_path / "runs").exists(), "a data set was made"


@pytest.mark.slow
def test_the_page_is_drawn(tmp_path: Path) -> None:
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no browser found; on Debian install one with: apt-get install chromium")
    words = "experiments/ppo.py --cluster h200-2x4 --actor llama3-13b --critic llama3-7b --batch-size 64"
    realhf_plan([*words.split(), "--evaluations", "2000", "--html", "plan.html"], tmp_path)
    page = tmp_path / "plan.html"
    page.write_text(page.read_text().replace("</body>", MEASURE + "</body>"))
    dom, log = rendered(browser, page, tmp_path / "profile")
    assert not [line for line in log.splitlines() if "CONSOLE" in line]
    drawn = re.sub(r"<(script|style)\b.*?</\1>", "", dom, flags=re.DOTALL)
    sections = dict(re.findall(r"<section><h2>(.*?)</h2>(.*?)</section>", drawn, flags=re.DOTALL))
    assert len(re.findall(r'class="point"', sections["Timeline of two steps"])) >= 12  # six calls in two steps
    assert len(re.findall(r'class="point"', sections["Memory of the devices"])) >= 2
    assert "limit " in sections["Memory of the devices"]
    assert len(re.findall(r'class="point"', sections["Compared with plans by rule"])) >= 3
    assert sections["Why not"].count("<tr>") == 1 + 6
    assert 'class="js-line"' in sections["Cost over the search"]
    match = re.search(r'data-measured="(.*?)"', dom)
    assert match
    measured = json.loads(match[1].replace("&quot;", '"'))
    assert measured["texts"] > 30
    assert measured["overflow_px"] <= 0
    assert measured["outside"] == []
    assert measured["overlaps"] == []
