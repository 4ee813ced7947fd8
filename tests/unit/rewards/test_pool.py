"""Rewards in processes: values, failures of every kind under every policy, ends of processes."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.base.errors import UserError
from realhf.rewards.jobs import RewardError
from realhf.rewards.messages import Kind
from realhf.rewards.pool import FunctionOptions, RewardPool, Score
from realhf.rewards.signature import Sample
from tests.unit.rewards.samples import of, sample
from tests.waiting import PATIENCE_S, wait_until

HERE = Path(__file__).parent
FUNCTIONS = HERE / "functions.py"
TIMEOUT_S = 1.0  # of functions that hang; others may take as long as a busy machine needs

# Per function the kind of its failure, and words of the reason.
WRONG: dict[str, tuple[Kind, str]] = {
    "raises": ("exception", "ValueError: no x please"),
    "exits": ("exception", "SystemExit: done"),
    "ends": ("end", "exit code 3"),
    "is_killed": ("end", "SIGKILL"),
    "not_finite": ("value", "returned nan"),
    "no_number": ("value", "'good' (str)"),
    "batch_raises": ("exception", "KeyError: 'x'"),
    "batch_ends": ("end", "exit code 3"),
    "batch_not_finite": ("value", "returned inf"),
    "async_raises": ("exception", "ValueError: no x please"),
    "async_ends": ("end", "exit code 3"),
    "async_batch_raises": ("exception", "KeyError: 'x'"),
}
HANGS = {
    "hangs": "took more than timeout_s=1 s, at\n  | functions.py",
    "batch_hangs": "took more than timeout_s=1 s",
    "async_hangs": "took more than timeout_s=1 s",
    "async_blocks": "without awaiting anything",
}


def name(function: str) -> str:
    return f"{FUNCTIONS}:{function}"


def score(functions: list[str], samples: list[Sample], log: Any = None, **options: Any) -> list[Score]:
    settings = FunctionOptions(**{"timeout_s": PATIENCE_S, **options})
    with contextlib.closing(RewardPool([name(function) for function in functions], settings, log)) as pool:
        return pool.score(samples)


@pytest.mark.parametrize("processes", [1, 3])
def test_values_in_the_order_of_the_samples(processes: int) -> None:
    responses = "the quick brown fox" * 10
    scores = score(["fine"], of(responses), processes=processes)
    assert [one.reward for one in scores] == [float(ord(response)) for response in responses]
    assert all(one.is_valid and not one.failures and one.seconds >= 0 for one in scores)


def test_nothing_to_score() -> None:
    assert score(["fine"], []) == []


def test_weights() -> None:
    with contextlib.closing(
        RewardPool([f"{name('fine')}=0.5", f"{name('without')}=3", f"{name('raises')}=0"], FunctionOptions())
    ) as pool:
        assert pool.names == ["fine", "without", "raises"]
        [one, other] = pool.score(of("ab"))
    assert one.reward == 0.5 * ord("a") + 3
    assert one.values == {"fine": ord("a"), "without": 1, "raises": 1}
    assert other.reward == 0.5 * ord("b") + 3


def test_values_of_tokens() -> None:
    """They add up token by token; a value for the whole response is a part of the last token's."""
    given = [sample(0, "a", tokens=(3, 1, 2)), sample(1, "b", tokens=(5,)), sample(2, "c")]
    names = [f"{name('of_tokens')}=0.5", f"{name('of_tokens')}=2", f"{name('fine')}=-1", f"{name('without')}=3"]
    with contextlib.closing(RewardPool(names, FunctionOptions())) as pool:
        assert pool.wants_tokens
        assert not pool.wants_token_texts
        scores = pool.score(given)
    ends = [3 - ord("a"), 3 - ord("b"), 3 - ord("c")]
    assert [one.of_tokens for one in scores] == [(7.5, 2.5, 5.0 + ends[0]), (12.5 + ends[1],), ()]
    assert [one.reward for one in scores] == [15 + ends[0], 12.5 + ends[1], ends[2]]
    assert scores[0].values["of_tokens"] == 6


@pytest.mark.parametrize("policy", ["zero", "drop"])
def test_a_value_for_some_of_the_tokens_is_a_failure(policy: Any) -> None:
    bad = sample(0, "x", tokens=(3, 1, 2))
    [one] = score(["of_tokens", "fine"], [bad], on_error=policy)
    [failure] = one.failures.values()
    assert (failure.kind, one.is_valid, one.of_tokens) == ("value", policy == "zero", ())
    assert "it returned 2 numbers for a response of 3 tokens; return one for each token" in failure.text
    assert one.reward == (ord("x") if policy == "zero" else 0)
    with pytest.raises(RewardError, match=r"of_tokens \(functions.py:\d+\) of step 3, sample 0.*2 numbers .*; correct"):
        score(["of_tokens"], [bad])


@settings(max_examples=5)
@given(weights=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=4), response=st.sampled_from("ax"))
def test_a_reward_is_the_weighted_sum_over_what_has_a_value(weights: list[float], response: str) -> None:
    functions = ["fine", "without", "fine", "without"][: len(weights)]
    names = [f"{name(function)}={weight!r}" for function, weight in zip(functions, weights, strict=True)]
    with contextlib.closing(RewardPool(names, FunctionOptions())) as pool:
        [one] = pool.score(of(response))
    expected = {"fine": float(ord(response)), "without": None if response == "x" else 1.0}
    values = [expected[function] for function in functions]
    assert list(one.values.values()) == values
    terms = [weight * value for weight, value in zip(weights, values, strict=True) if value is not None]
    assert one.reward == pytest.approx(sum(terms))


@pytest.mark.parametrize("policy", ["zero", "drop"])
def test_failures_of_every_kind(policy: Any) -> None:
    """Each function fails for one sample alone, which is treated as the policy says, and the others are scored."""
    functions = [*WRONG, "fine"]
    scores = score(functions, of("abxc"), on_error=policy, processes=2)
    bad = scores[2]
    assert {function: failure.kind for function, failure in bad.failures.items()} == {
        function: kind for function, (kind, _) in WRONG.items()
    }
    for function, (_, words) in WRONG.items():
        text = bad.failures[function].text
        assert words in text
        assert f"{function} (functions.py:" in text
        assert "step 3, sample 2, prompt 'What is 2 + 2?'" in text
        assert bad.values[function] is None
    assert bad.is_valid == (policy == "zero")
    assert bad.reward == (ord("x") if policy == "zero" else 0)
    for one, response in zip(scores, "abxc", strict=True):
        if response != "x":
            assert not one.failures
            assert one.is_valid
            assert one.reward == len(WRONG) + ord(response)


@pytest.mark.parametrize("function", WRONG)
def test_a_failure_that_ends_the_run(function: str) -> None:
    _, words = WRONG[function]
    with pytest.raises(RewardError) as caught:
        score([function], of("abxc"))
    text = str(caught.value)
    assert words in text
    assert "sample 2" in text
    assert "--reward.on-error zero, or drop" in text


@pytest.mark.parametrize("function", HANGS)
def test_a_function_that_hangs(function: str) -> None:
    with pytest.raises(RewardError) as caught:
        score([function], of("ax"), timeout_s=TIMEOUT_S)
    assert HANGS[function] in str(caught.value)
    assert "sample 1" in str(caught.value)


@pytest.mark.parametrize("policy", ["zero", "drop"])
def test_functions_that_hang_are_treated_as_the_policy_says(policy: Any) -> None:
    one, bad = score([*HANGS], of("ax"), timeout_s=TIMEOUT_S, on_error=policy, processes=2)
    assert (one.reward, one.is_valid) == (len(HANGS), True)
    assert {name: failure.kind for name, failure in bad.failures.items()} == dict.fromkeys(HANGS, "time")
    assert (bad.reward, bad.is_valid) == (0, policy == "zero")


@pytest.mark.parametrize("function", ["never_cancelled", "holds_everything"])
def test_a_process_that_does_not_react_is_replaced(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realhf.rewards.driver._GRACE_S", 0.5)
    [one, bad] = score([function], of("ax"), on_error="zero", timeout_s=TIMEOUT_S)
    assert one.reward == 1
    assert bad.failures[function].kind == "time"


def test_a_wrong_number_of_rewards_is_blamed_on_all_samples() -> None:
    scores = score(["too_few"], of("abc"), on_error="drop")
    assert all("2 rewards for a batch of 3" in one.failures["too_few"].text and not one.is_valid for one in scores)


def test_a_sample_without_any_reward() -> None:
    with pytest.raises(RewardError, match="no function gives this sample a reward"):
        score(["without"], of("ax"))
    zero = score(["without"], of("ax"), on_error="zero")
    assert [(one.reward, one.is_valid, len(one.failures)) for one in zero] == [(1, True, 0), (0, True, 1)]
    drop = score(["without"], of("ax"), on_error="drop")
    assert [(one.reward, one.is_valid) for one in drop] == [(1, True), (0, False)]


def test_a_thousand_async_calls_are_under_way_at_once() -> None:
    samples = [sample(id, row={"all": 1000}) for id in range(1000)]
    scores = score(["meets"], samples, timeout_s=600)
    assert [one.reward for one in scores] == [1] * 1000


def test_async_calls_wait_for_their_turn() -> None:
    scores = score(["alone"], of("abcdefgh"), concurrency=1)
    assert [one.reward for one in scores] == [1] * 8
    assert max(one.reward for one in score(["alone"], of("abcdefgh"), concurrency=3)) == 3


def test_rows_arrive_as_they_are() -> None:
    row = {"number": 7, "nested": {"a": [1, None, -(10**30)]}, "large": 10**40, "other": 1.5}
    [one] = score(["rows"], [sample(row=row)])
    assert one.reward == 7


def test_functions_have_the_main_thread_and_no_gpu() -> None:
    [one] = score(["is_main_thread", "environment"], of("a"))
    assert one.reward == 2


class Log(io.BytesIO):
    def close(self) -> None:
        """Kept: threads write until their processes are gone."""


def test_what_functions_print_goes_to_the_log() -> None:
    log = Log()
    assert [one.reward for one in score(["prints"], of("ab"), log)] == [1, 1]
    wait_until(lambda: b"warning of b" in log.getvalue())
    assert b"[reward process 0] scoring a\n" in log.getvalue()
    assert b"[reward process 0] written below Python\n" in log.getvalue()


def test_a_flood_of_output_is_cut_off() -> None:
    log = Log()
    [one] = score(["floods"], of("a"), log)
    assert one.reward == 1
    wait_until(lambda: b"the rest is left out" in log.getvalue())
    assert len(log.getvalue()) < 20 * 2**20


def pids(pool: RewardPool) -> list[int]:
    """The processes of the pool that are there now."""
    return [driver._process._child.pid for driver in pool._drivers if driver._process is not None]


def started(folder: Path) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in folder.glob("pid-*")]


def test_a_process_killed_in_a_call_is_replaced_and_the_call_made_again(tmp_path: Path) -> None:
    results: list[Score] = []
    with contextlib.closing(RewardPool([name("waits_in")], FunctionOptions())) as pool:
        thread = threading.Thread(
            target=lambda: results.extend(pool.score([sample(i, row={"folder": str(tmp_path)}) for i in range(3)]))
        )
        thread.start()
        wait_until(lambda: bool(started(tmp_path)))
        [first] = started(tmp_path)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: len(started(tmp_path)) == 2)
        (tmp_path / "go").touch()
        thread.join()
        assert first not in pids(pool)
    assert [one.reward for one in results] == [1, 1, 1]


def test_closing_ends_processes_and_a_call(tmp_path: Path) -> None:
    errors: list[BaseException] = []
    pool = RewardPool([name("waits_in")], FunctionOptions())

    def call() -> None:
        try:
            pool.score([sample(row={"folder": str(tmp_path)})])
        except RewardError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    wait_until(lambda: bool(started(tmp_path)))
    pool.close()
    thread.join()
    assert "closed" in str(errors[0])
    assert not any(psutil.pid_exists(pid) for pid in started(tmp_path))


def test_threads_share_a_pool() -> None:
    results: dict[str, list[Score]] = {}
    with contextlib.closing(RewardPool([name("fine"), name("async_raises")], FunctionOptions(processes=2))) as pool:
        threads = [
            threading.Thread(target=lambda text=text: results.update({text: pool.score(of(text))}))  # type: ignore[misc]
            for text in ("abc" * 20, "def" * 20, "ghi" * 20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {text: [one.reward for one in scores] for text, scores in results.items()} == {
        text: [ord(response) + 1.0 for response in text] for text in ("abc" * 20, "def" * 20, "ghi" * 20)
    }


WORKER = """
import sys
from realhf.rewards.pool import FunctionOptions, RewardPool
from realhf.rewards.signature import Sample
pool = RewardPool([sys.argv[1]], FunctionOptions())
pool.score([Sample(id=0, step=0, prompt="", response="", row={"folder": sys.argv[2]})])
"""


@pytest.mark.parametrize("function", ["waits_in", "holds_in", "child_process"])
def test_processes_end_with_a_worker_that_is_killed(function: str, tmp_path: Path) -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER, name(function), str(tmp_path)])
    pattern = "child-*" if function == "child_process" else "pid-*"
    wait_until(lambda: bool(list(tmp_path.glob(pattern))))
    processes = psutil.Process(worker.pid).children()
    assert processes
    worker.kill()
    worker.wait()
    wait_until(lambda: not any(process.is_running() and process.status() != "zombie" for process in processes))
    for path in tmp_path.glob("child-*"):  # what a function leaves behind ends with the launcher: by its mark
        os.kill(int(path.name.partition("-")[2]), signal.SIGKILL)


def test_the_code_of_functions_is_in_their_processes_alone(tmp_path: Path) -> None:
    """What a file imports or loads takes no memory of the worker."""
    functions = "def f(response): return 1\nasync def g(response): return 2"
    (tmp_path / "r.py").write_text(f"import os\nopen(f'{tmp_path}/pid-{{os.getpid()}}', 'w')\n{functions}")
    with contextlib.closing(
        RewardPool([f"{tmp_path}/r.py:f", f"{tmp_path}/r.py:g"], FunctionOptions(processes=2))
    ) as pool:
        assert [one.reward for one in pool.score(of("ab"))] == [3, 3]
        wait_until(lambda: len(started(tmp_path)) == 3)
        assert set(started(tmp_path)) == set(pids(pool))


def test_a_function_that_is_gone_when_processes_start(tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    file.write_text("def f(response): return 1")
    with contextlib.closing(RewardPool([f"{file}:f"], FunctionOptions())) as pool:
        assert pool.score(of("a"))[0].reward == 1
        file.write_text("import nothing_here")
        os.kill(pids(pool)[0], signal.SIGKILL)
        with pytest.raises(RewardError, match=r"r\.py:1: cannot be imported"):
            pool.score(of("a"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on_error": "skip"}, "choose one of fail, zero, drop"),
        ({"timeout_s": 0.0}, "timeout_s 0"),
        ({"timeout_s": float("nan")}, "timeout_s nan"),
        ({"processes": -1}, "processes -1"),
        ({"concurrency": 0}, "concurrency 0"),
        ({"batch_samples": 0}, "batch_samples 0"),
    ],
)
def test_options(options: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        FunctionOptions(**options)
