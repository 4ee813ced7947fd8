"""Every number of the planning commands and of their files has a range, checked before anything is computed with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from realhf.base.errors import UserError
from realhf.cli import main
from realhf.dataflow.plan import load_plan
from realhf.planning.clusters import parse_cluster
from realhf.planning.model.descriptions import DESCRIPTIONS, load_hardware
from realhf.planning.model.profile import load_profile
from realhf.planning.problem.file import load_problem

ROOT = Path(__file__).parents[3]
PPO = str(ROOT / "experiments/ppo.py")
PROBLEM = str(ROOT / "tests/data/planning_problems/n1_steps3.json")
OSDP = ["osdp", "llama7b", "--devices", "8", "--memory-gb", "40"]
COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "plan": (
        ["plan", PPO, "--actor", "llama3-7b"],
        ["--num-workers", "--nodes", "--gpus-per-node", "--evaluations", "--seconds", "--memory-gb", "--prompt-tokens",
         "--new-tokens", "--batch-size", "--staleness", "--staleness-up-to"],
    ),
    "search": (["search", PROBLEM], ["--seconds", "--evaluations", "--seed", "--threads"]),
    "osdp": (
        OSDP,
        ["--devices", "--memory-gb", "--batch", "--max-batch", "--sequence-length", "--slices", "--launch-us",
         "--seconds"],
    ),
    "profile": (["profile", PPO], ["--num-workers", "--repetitions", "--max-tokens", "--timeout-s"]),
    "replan": (["replan", "no-run"], ["--evaluations", "--seconds"]),
}  # fmt: skip
ZERO_IS_GOOD = {"--staleness", "--staleness-up-to", "--seed", "--launch-us", "osdp --seconds"}
CASES = [
    (name, option, value)
    for name, (_, options) in COMMANDS.items()
    for option in options
    for value in ("nan", "inf", "-1", "0", "1000000000000000000000")
    if not (value == "0" and {option, f"{name} {option}"} & ZERO_IS_GOOD)
]


@pytest.mark.parametrize(("name", "option", "value"), CASES)
def test_options(name: str, option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, _ = COMMANDS[name]
    try:
        code = main([*words, f"{option}={value}"])
    except SystemExit as ended:  # argparse: no whole number
        code = int(str(ended.code))
    error = capsys.readouterr().err
    assert code == 2, error
    assert option.lstrip("-") in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "name", ["h100-100000x8", "h100-8x100000", "h100-2000x1000", "h100-0x8", f"h100-1x{'9' * 5000}"]
)
def test_clusters_by_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", PPO, "--actor", "llama3-7b", "--cluster", name]) == 2
    assert "is not from 1 to 4,096" in capsys.readouterr().err


BAD = [-1, 10**18, 1e300]
DEEP = "[" * 100_000 + "]" * 100_000


def changed(content: Any, path: tuple[Any, ...], value: Any) -> str:
    """The JSON of `content` with another value at `path`."""
    copy = json.loads(json.dumps(content))
    place = copy
    for key in path[:-1]:
        place = place[key]
    assert path[-1] in place if isinstance(place, dict) else True, path
    place[path[-1]] = value
    return json.dumps(copy)


def numbers_of(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where JSON has numbers; of a list or a dict of many, the first."""
    if isinstance(content, dict):
        items = list(content.items())[:40]
    elif isinstance(content, list):
        items = list(enumerate(content))[:2]
    else:
        return [path] if isinstance(content, int | float) and not isinstance(content, bool) else []
    return [place for key, value in items for place in numbers_of(value, (*path, key))]


CALL = {"devices": [0, 4], "dp": 4, "tp": 1, "pp": 1, "chunks": 1, "micro_dp": [1, 1], "micro_batches": 1,
        "predicted_s": 1.0}  # fmt: skip
PLAN = {
    "num_devices": 4, "devices_per_node": 4, "max_steps_in_flight": 2, "predicted_step_s": 1.0, "calls": {"sft": CALL},
    "order": [{"call": "sft", "steps_back": 0}],
}  # fmt: skip


@pytest.mark.parametrize("path", numbers_of(PLAN))
@pytest.mark.parametrize("value", BAD)
def test_plans(path: tuple[Any, ...], value: float, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(PLAN))
    load_plan(file)
    file.write_text(changed(PLAN, path, value))
    with pytest.raises(UserError, match=r"plan\.json: "):
        load_plan(file)


PROBLEM_2 = {
    "format": "planning-problem/2", "num_devices": 2, "devices_per_node": 2, "device_memory_bytes": 100.0, "steps": 4,
    "max_steps_in_flight": 2, "communicator_bytes": 1.0, "sending_bytes": 1.0,
    "calls": [{
        "name": "a", "model": "m", "trains": False, "home": "a", "parents": [["a", 1]], "spared": [["x", "x", 1.0]],
        "options": [{"devices": [0, 1], "strategy": "x", "micro_batches": 1, "time_s": 1.0, "static_bytes": 1.0,
                     "dynamic_bytes": 1.0, "copy_bytes": 1.0, "communicators": [3]}],
    }],
    "transfers": [{"name": "t", "from": "a", "to": "a", "on": ["a"], "parents": [["a", 1]], "rows": [0],
                   "columns": [0], "times_s": [[1.0]]}],
}  # fmt: skip
PROBLEM_1 = json.loads(Path(PROBLEM).read_bytes())


@pytest.mark.parametrize("content", [PROBLEM_1, PROBLEM_2], ids=["1", "2"])
@pytest.mark.parametrize("value", [-1, 10**19, 1e300])
def test_problem_files(content: dict[str, Any], value: float, tmp_path: Path) -> None:
    file = tmp_path / "problem.json"
    file.write_text(json.dumps(content))
    load_problem(file)
    for path in numbers_of(content):
        file.write_text(changed(content, path, value))
        with pytest.raises(UserError, match=r"problem\.json: "):
            load_problem(file)


@pytest.mark.parametrize("content", [PROBLEM_1, PROBLEM_2], ids=["1", "2"])
def test_many_steps_are_refused_before_the_search(
    content: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "problem.json"
    for steps in (1_000_000, 8000):
        file.write_text(changed(content, ("steps",), steps))
        assert main(["search", str(file)]) == 2
        assert "problem.json: " in capsys.readouterr().err


@pytest.mark.parametrize("value", [".nan", ".inf", "-1", "1.0e+300"])
def test_hardware_files(value: str, tmp_path: Path) -> None:
    text = (DESCRIPTIONS / "h100.yaml").read_text()
    lines = text.splitlines()
    numeric = [i for i, line in enumerate(lines) if line.partition("#")[0].rstrip()[-1:].isdigit() and ": " in line]
    assert len(numeric) > 10
    for i in numeric:
        if lines[i].startswith("name"):
            continue
        one = [*lines[:i], f"{lines[i].partition(': ')[0]}: {value}", *lines[i + 1 :]]
        (tmp_path / "h100.yaml").write_text("\n".join(one))
        with pytest.raises(UserError, match=r"h100\.yaml: not a hardware description"):
            load_hardware(str(tmp_path / "h100.yaml"))


@pytest.mark.parametrize("value", [".nan", ".inf", "-1", "0", "1000000000000000000"])
@pytest.mark.parametrize("field", ["nodes", "devices_per_node", "device_memory_gb"])
def test_cluster_files(field: str, value: str, tmp_path: Path) -> None:
    fields = {"nodes": "2", "devices_per_node": "8", "device_memory_gb": "80"} | {field: value}
    inner = ", ".join(f"{name}: {number}" for name, number in fields.items())
    (tmp_path / "c.yaml").write_text(f"groups: [{{hardware: h100, {inner}}}]")
    with pytest.raises(UserError, match=r"c\.yaml: "):
        parse_cluster(str(tmp_path / "c.yaml"))


def test_deeply_nested_files(tmp_path: Path) -> None:
    for name, load in (("a.json", load_plan), ("a.json", load_problem), ("a.json", load_profile)):
        for content in (DEEP, '{"notes": ' + DEEP + "}", '{"format": ' + DEEP + "}"):
            (tmp_path / name).write_text(content)
            with pytest.raises(UserError, match=r"a\.json: "):
                load(tmp_path / name)
    (tmp_path / "a.yaml").write_text("[" * 5000 + "]" * 5000)
    with pytest.raises(UserError, match=r"a\.yaml: "):
        parse_cluster(str(tmp_path / "a.yaml"))
    (tmp_path / "a.yaml").write_text("[" * 5000 + "]" * 5000)
    with pytest.raises(UserError, match=r"a\.yaml: "):
        load_hardware(str(tmp_path / "a.yaml"))
