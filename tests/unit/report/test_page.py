"""The page of a report: what it says of runs in every state, and that it needs nothing but itself."""

import base64
import gzip
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.cli import main
from realhf.report.curves import MAX_POINTS, curves_of, main_names, split_curves, thinned
from realhf.report.page import write_report
from realhf.rundir.paths import RunDirectory
from tests.unit.report.run_directories import good_run, metrics_line, sample, step_events, write_run
from tests.waiting import PATIENCE_S


def visible(path: Path) -> str:
    """The text of the page without scripts and style."""
    html = re.sub(r"<(script|style)\b.*?</\1>", "", path.read_text(), flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def report_of(run: Path) -> str:
    return visible(write_report(RunDirectory(run)))


def test_a_finished_run(tmp_path: Path) -> None:
    text = report_of(good_run(tmp_path / "run"))
    for expected in (
        "run (PPOExperiment) finished",
        "4 of 4 steps",
        "1,250 tokens/s",
        "actor_generate 0.500 0.4-0.7 1.500 3.00",
        "critic_train_step - - 0.250 -",
        "whole step 2.000 1.6-2.8 2.000 1.00",
        "Timeline of steps 3 and 4",
        "actor_train_step 0-1 1 2 1 4 - 1.000",
        "critic_train_step 1 1 1 1 1 -",
        "actor_generate → actor_train_step → critic_train_step (of 1 step before)",
        "at most 2",
        "search &lt;seeded&gt;",
    ):
        assert expected in text


def test_the_reasons_of_the_plan(tmp_path: Path) -> None:
    text = report_of(good_run(tmp_path / "run"))
    for expected in (
        "chosen the best of 20,000 plans that a search looked at, out of 4 x 4 x 2 options",
        "predicted from measured layer timings, hardware cpu",
        "how good optimal: no plan takes less than 2 s a step",
        "all calls alike 3 s a step, 1.50 x this plan, and does not fit into memory",
        "limited by the longest chain of calls (actor_generate 60%)",
        "actor_generate dp1 tp2 pp1 +25.0% 1 of 4",
        "critic_train_step nothing else fits - 2 of 2",
    ):
        assert expected in text
    assert "evaluations 20000" not in text  # the note says it already


def test_what_changed_in_the_run(tmp_path: Path) -> None:
    text = report_of(good_run(tmp_path / "run"))
    assert re.search(
        r"started 0 2 workers 2001-09-\d\d [\d:]+ failed 2 &lt;killed&gt; 2001-09-\d\d [\d:]+ restarted 2", text
    )
    text = report_of(good_run(tmp_path / "quiet", happened=None))
    assert "Nothing is noted: no restart, no other plan." in text


def test_a_failed_run_says_why_and_its_text_stays_text(tmp_path: Path) -> None:
    message = "worker-1 ended with signal 9 during <script>alert(1)</script>; read logs/worker-1.log"
    run = good_run(tmp_path / "run", state="failed", message=message, cut_off=',\n{"name":"actor_ge')
    text = report_of(run)
    assert "run (PPOExperiment) failed" in text
    assert "worker-1 ended with signal 9 during &lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "Timeline of steps 3 and 4" in text


def test_a_run_that_goes_on_says_when_it_was_last_heard_of(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", state="running", metrics=[metrics_line(1, loss=1.0)], events=step_events(0, 1.0))
    text = report_of(run)
    assert "running" in text
    assert re.search(r"the run wrote its status \d+ d( \d+ h)? before", text)  # an hour a day it is whole days
    assert "1 of 4 steps" in text
    assert "Timeline of step 1" in text


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    text = report_of(write_run(tmp_path / "run", state=None))
    assert "not started" in text
    assert "No step has ended yet." in text
    assert "No step is complete in the trace yet." in text


def test_a_run_of_one_call_without_predictions(tmp_path: Path) -> None:
    plan = {"num_devices": 1, "calls": {"sft_train_step": {"devices": [0, 1]}}}
    calls = {"sft_train_step": {"start": 0.0, "end": 0.5, "seconds": 0.5, "predicted_s": None}}
    metrics = [{"step": 1, "time_s": 0.5, "tokens": 100, "tokens_per_s": 200.0, "loss": 3.0, "calls": calls}]
    text = report_of(write_run(tmp_path / "run", plan=plan, metrics=metrics))
    assert "sft_train_step - - 0.500 -" in text
    assert "The plan carries no predictions" in text
    assert "one step after the other" in text
    assert "Nothing was measured yet." in text  # a run of an earlier version has no memory in its metrics


def test_the_page_asks_nothing_of_the_network(tmp_path: Path) -> None:
    html = write_report(RunDirectory(good_run(tmp_path / "run"))).read_text()
    assert "default-src 'none'" in html
    library = r'<script id="plotly" .* data-size="([0-9]+)">(.*?)</script>'
    [(size, packed)] = re.findall(library, html)  # it is there, once
    content = base64.b85decode(packed.translate(str.maketrans(":.,", "<>&")))[: int(size)]
    assert b"plotly.js v" in gzip.decompress(content)
    without_library = re.sub(library, "", html)
    assert len(without_library) < 200_000
    assert not re.search(r"""(src|href)\s*=\s*["']|url\(|@import""", without_library)


def test_an_earlier_report_is_replaced_whole(tmp_path: Path) -> None:
    run = good_run(tmp_path / "run")
    (run / "report.html").write_text("old")
    write_report(RunDirectory(run))
    assert "finished" in (run / "report.html").read_text()
    assert not [path for path in run.iterdir() if path.name.endswith(".part")]


def test_curves_skip_what_is_no_number() -> None:
    lines = [{"step": 1, "kl": 0.5, "name": "x", "calls": {}}, {"step": 2, "kl": None, "loss": 2}]
    lines = [line | {"of_steps": 2, "num_workers": 4} for line in lines]
    assert curves_of(lines) == {"kl": ([1, 2], [0.5, None]), "loss": ([1, 2], [None, 2.0])}


def test_the_curves_people_look_for_come_first() -> None:
    line = metrics_line(1, lr=1.0, critic_loss=1.0, kl=0.1, actor_loss=2.0, kl_per_sequence=1.0, reward_mean=1.0)
    main_curves, others = split_curves([line])
    assert list(main_curves) == ["reward_mean", "kl", "critic_loss", "actor_loss", "tokens_per_s"]
    assert list(others) == ["lr", "kl_per_sequence"]


def test_the_rewards_of_several_functions_stand_behind_their_sum() -> None:
    """Then the share of groups that teach something, and how training goes."""
    of_update = ("entropy", "kl", "actor_loss", "actor_grad_norm", "actor_lr", "informative_groups")
    of_rewards = ("reward_total", "reward_failures", "reward_seconds", "reward_correct", "reward_mean")
    names = [*of_update, *of_rewards, "reward_short"]
    parts = ["reward_correct", "reward_short"]
    of_training = ["informative_groups", "kl", "actor_loss", "entropy", "actor_grad_norm"]
    assert main_names(names) == ["reward_mean", *parts, *of_training]
    assert main_names([*of_update, *of_rewards]) == ["reward_mean", *of_training], "that of one function is the sum"
    of_a_reward_model = ["reward_loss", "reward_grad_norm", "reward_lr", "pair_accuracy"]
    assert main_names(of_a_reward_model) == ["reward_loss", "reward_grad_norm", "pair_accuracy"]


@given(values=st.lists(st.none() | st.floats(-1e9, 1e9), min_size=1, max_size=3 * MAX_POINTS))
def test_a_thinned_curve_keeps_its_ends_and_what_stands_out(values: list[float | None]) -> None:
    steps = list(range(5, 5 + len(values)))
    kept_steps, kept_values = thinned((steps, values))
    assert len(kept_steps) <= MAX_POINTS
    assert (kept_steps[0], kept_steps[-1]) == (steps[0], steps[-1])
    assert kept_steps == sorted(set(kept_steps))
    assert kept_values == [values[step - 5] for step in kept_steps]
    numbers, kept = ([value for value in some if value is not None] for some in (values, kept_values))
    assert (min(numbers, default=0), max(numbers, default=0)) == (min(kept, default=0), max(kept, default=0))


def test_every_statistic_of_the_evaluations_is_in_a_table(tmp_path: Path) -> None:
    evaluations = [{"step": 5 * i, "accuracy": i / 100, "math": 1.0, "reward": -0.5} for i in range(100)]
    evaluations[99] = {"step": 495, "accuracy": 0.99}
    path = write_report(RunDirectory(good_run(tmp_path / "run", evaluations=evaluations)))
    text = visible(path)
    assert "12 of 100 evaluations" in text
    assert "statistic step 0 step 45 step 90" in text
    assert "step 495 accuracy 0 0.09 0.18" in text
    assert "0.99 math 1 1 1" in text
    assert "-0.5 - " in text
    for title in ("evaluation: reward", "evaluation: math", '"text":"evaluation"', '"name":"accuracy"'):
        assert title in path.read_text()


def test_the_report_of_a_long_run_stays_small(tmp_path: Path) -> None:
    rng = random.Random(0)
    names = [f"statistic_{i}" for i in range(24)]
    metrics = [metrics_line(step, **{name: rng.gauss(0, 1) for name in names}) for step in range(1, 5001)]
    samples = [
        sample(step, i, response="".join(rng.choices("ab<>&\n", k=900))) for step in range(1, 1000) for i in (0, 1)
    ]
    evaluations = [{"step": step, **{name: rng.gauss(0, 1) for name in names[:8]}} for step in range(0, 5001, 10)]
    run = good_run(tmp_path / "run", metrics=metrics, samples=samples, evaluations=evaluations)
    assert write_report(RunDirectory(run)).stat().st_size < 2.2e6


def test_the_command_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = good_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert (run / "report.html").stat().st_size > 1_000_000


def test_the_command_refuses_another_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_no_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from realhf.report.page import write_report;"
        "from realhf.rundir.paths import RunDirectory;"
        f"write_report(RunDirectory(Path({str(good_run(tmp_path / 'run'))!r}))); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
