"""Reward functions by their names, checked before a process starts."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.base.errors import UserError
from realhf.rewards.ready import READY
from realhf.rewards.sources import RewardSource, load_rewards, notes_of, without_secrets

REWARDS = """
from realhf.rewards.signature import batch
LIMIT = 3
def correct(response, answer):
    return response == answer

async def polite(prompt, response): ...
def _own(response): ...
class Judge:
    def __init__(self, limit=LIMIT): ...
    def __call__(self, response): ...
judge = Judge()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


def test_functions_of_a_file(file: Path) -> None:
    rewards = load_rewards(
        [f"{file}:correct", f"{file}:polite=0.5", f"{file}:correct=-2", f"{file}:judge"], ["prompt", "answer"]
    )
    assert [reward.name for reward in rewards] == ["correct", "polite", "correct_2", "judge"]
    assert [reward.weight for reward in rewards] == [1.0, 0.5, -2.0, 1.0]
    assert [reward.signature.is_async for reward in rewards] == [False, True, False, False]
    assert rewards[0].place == "correct (rewards.py:4)"


def test_names_of_statistics_are_kept_free(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def total(response): ...")
    assert load_rewards([f"{tmp_path}/r.py:total"])[0].name == "total_2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rewards.py", "names no function"),
        ("rewards.txt:correct", "names no function"),
        ("nowhere.py:correct", "there is no file .*nowhere.py; give the path"),
        ("FILE:corect", "has no function 'corect'; it has the functions correct, polite"),
        ("FILE:LIMIT", "has int under the name 'LIMIT'"),
        ("FILE:Judge", "is a class"),
        ("FILE:correct=heavy", "the weight 'heavy' is no number"),
        ("FILE:correct=nan", "the weight nan is not finite"),
        ("FILE:correct=inf", "not finite"),
        ("ready:exact", "no ready reward 'exact'; choose one of exact_match, numeric"),
        ("ready:exact_match(colum='a')", "no option 'colum'; it has column, strip"),
        ("ready:regex", "needs pattern"),
        ("ready:regex(pattern='(')", "pattern"),
        ("ready:regex('a')", "cannot be read"),
        ("ready:regex(pattern=open('x'))", "cannot be read"),
        ("ready:overlong(max_tokens=2, cache_tokens=3)", "cache_tokens=3"),
        ("ready:server(url='ftp://x')", "no address"),
    ],
)
def test_mistakes(file: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        load_rewards([text.replace("FILE", str(file))], ["answer"])
    assert "\n" not in str(caught.value)


def test_no_reward() -> None:
    with pytest.raises(UserError, match="there is no reward function"):
        load_rewards([])


def test_an_error_of_the_file_has_its_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import os\nimport no_such_module\n")
    with pytest.raises(UserError, match=r"broken.py:2: cannot be imported: ModuleNotFoundError"):
        load_rewards([f"{tmp_path}/broken.py:correct"])


def test_parameters_without_a_column(file: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_rewards([f"{file}:correct"], ["prompt", "label"])
    assert str(caught.value) == (
        "reward correct (rewards.py:4) asks for 'answer', and the data have no such column: they have label, prompt, "
        "and a call gives prompt, response, completion, response_length, response_ids, response_tokens; rename the "
        "parameter, give it a default, or add the field to the data"
    )
    with pytest.raises(UserError, match=r"ready:exact_match asks for 'answer'"):
        load_rewards(["ready:exact_match"], ["label"])
    load_rewards(["ready:exact_match(column='label')"], ["label"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("http://user:secret@host/a.py:f=x", "reward 'http://...@host/a.py:f=x': the weight is no number; "),
        ("r.py:f=x", "reward 'r.py:f=x': the weight 'x' is no number; "),
        ("r.py:f=-inf", "reward 'r.py:f=-inf': the weight -inf is not finite; give a finite number"),
        (
            "http://host/a.py:f",
            "reward http://host/a.py:f: there is no file at an address; give the path of a Python file",
        ),
        ("r.py:1f", "reward 'r.py:1f' names no function; give FILE.py:FUNCTION"),
        (
            "ready:math_verify(a=1, b=2)",
            "reward ready:math_verify(a=1, b=2): math_verify has no option 'a'; it has column",
        ),
        (
            "ready:overlong(cache_tokens=1)",
            "reward ready:overlong(cache_tokens=1): overlong needs max_tokens; write ready:overlong(max_tokens=...)",
        ),
        ("ready:overlong", "overlong needs max_tokens, cache_tokens; write ready:overlong(max_tokens=...)"),
        ("ready:regex(**a)", "reward ready:regex(**a) cannot be read; write ready:NAME(option=value, ...) with plain"),
        ("ready:regex(", "cannot be read"),
        ("ready:a.b", "cannot be read"),
        ("ready:" + "(" * 10_000, "cannot be read"),
        (
            "ready:numeric(tolerance=-1)",
            "reward ready:numeric(tolerance=-1): tolerance=-1 must be finite and at least 0; ",
        ),
        (
            "ready:numeric(tolerance='a')",
            "reward ready:numeric(tolerance='a'): must be real number, not str; correct its",
        ),
    ],
)
def test_what_is_said_of_a_mistake(text: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        load_rewards([text])
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "def b(r): ...\ndef a(r): ...\ndef _c(r): ...\nfrom json import loads\nD = 1",
            "has no function 'f'; it has the functions a, b",
        ),
        ("from json import loads", "has no function 'f'; it has no functions"),
        ("f = 3", "has int under the name 'f'; it has no functions"),
        ("class f: ...", ":f is a class; make an object of it in the file, and name that"),
    ],
)
def test_what_a_file_has_in_place_of_a_function(code: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(code)
    with pytest.raises(UserError) as caught:
        load_rewards([f"{tmp_path}/r.py:f"])
    assert str(caught.value) == f"{tmp_path}/r.py{'' if words.startswith(':') else ' '}{words}"


def test_where_a_function_is(tmp_path: Path) -> None:
    """A wrapped one where it is written; an object and a ready one have no line."""
    (tmp_path / "r.py").write_text(
        "import functools\n"
        "def inner(response): ...\n"
        "@functools.wraps(inner)\n"
        "def f(*args): ...\n"
        "class Judge:\n"
        "    def __call__(self, response): ...\n"
        "judge = Judge()\n"
    )
    loaded = load_rewards([f"{tmp_path}/r.py:f", f"{tmp_path}/r.py:judge", "ready:numeric(column='a')=2"])
    assert [one.place for one in loaded] == ["f (r.py:2)", "judge (r.py)", "ready:numeric(column='a')"]
    assert [one.weight for one in loaded] == [1, 1, 2]


def test_a_source_counts_once_unless_it_says_otherwise() -> None:
    assert RewardSource("r.py", "f") == RewardSource.parse("r.py:f") == RewardSource("r.py", "f", 1.0)


def test_names_of_functions_are_told_apart() -> None:
    names = [one.name for one in load_rewards(["ready:numeric"] * 3 + [" ready:regex(pattern='a') "])]
    assert names == ["numeric", "numeric_2", "numeric_3", "regex"]


def test_columns_that_are_not_known_are_not_looked_at() -> None:
    assert load_rewards(["ready:exact_match(column='anything')"])
    with pytest.raises(UserError, match="they have none, and a call gives"):
        load_rewards(["ready:exact_match"], [])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://a:b@host/x?c=d", "http://...@host/x?..."),
        ("see http://host/?c='d'", "see http://host/?...'d'"),
        ("what?", "what?..."),
        ("a ? b", "a ? b"),
        ("http://host/a@b", "http://host/a@b"),
    ],
)
def test_secrets_of_addresses_are_left_out(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


@given(weight=st.floats(allow_nan=False, allow_infinity=False), folder=st.sampled_from(["", "a=b/", "c:d/", "/e/"]))
def test_weights(weight: float, folder: str) -> None:
    parsed = RewardSource.parse(f"{folder}rewards.py:f={weight!r}")
    assert (parsed.module, parsed.function, parsed.weight) == (f"{folder}rewards.py", "f", weight)
    assert RewardSource.parse(parsed.text).weight == 1.0
    ready = RewardSource.parse(f"ready:regex(pattern='a=b:c')={weight!r}")
    assert (ready.function, ready.weight) == ("regex(pattern='a=b:c')", weight)


@given(st.text(max_size=30))
def test_any_text_is_a_source_or_a_user_s_error(text: str) -> None:
    try:
        parsed = RewardSource.parse(text)
    except UserError:
        return
    assert math.isfinite(parsed.weight)


def test_what_the_kernel_lacks_is_said_of_unit_tests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realhf.rewards.sources.missing_protections", lambda: ["programs may do much"])
    assert notes_of(["ready:unit_tests(share=True)", "a.py:f"]) == ["ready:unit_tests: programs may do much"]
    assert notes_of(["ready:numeric", "a.py:unit_tests"]) == []


def test_every_ready_function_has_a_purpose() -> None:
    assert all(maker.__doc__ for maker in READY.values())
