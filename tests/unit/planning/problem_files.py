"""Planning problems as dictionaries, for the tests: the reference ones, and small random ones."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import msgspec

from realhf.planning import _search
from realhf.planning.problem.file import ProblemFile
from realhf.planning.problem.native import native_problem
from tests.unit.planning.evaluate_plan import Problem, evaluate

FOLDER = Path(__file__).resolve().parents[2] / "data" / "planning_problems"
OPTIMA: dict[str, Any] = json.loads((FOLDER / "optima.json").read_text())
NAMES = sorted(OPTIMA)


def reference_problem(name: str) -> Problem:
    result: Problem = json.loads((FOLDER / f"{name}.json").read_text())
    return result


def native(problem: Problem) -> _search.Problem:
    return native_problem(msgspec.convert(problem, ProblemFile).problem())


def solve(engine: _search.Problem, **asked: Any) -> "_search.Solution":
    """With a number of evaluations on one thread, unless something else is asked for."""
    given = {"seconds": 0, "threads": 1, "starts": (), "progress": _search.Progress()}
    return engine.solve(**given | asked)


def named(problem: Problem, plan: Any) -> dict[str, int]:
    return {call["name"]: option for call, option in zip(problem["calls"], plan, strict=True)}


def random_plan(problem: Problem, rng: random.Random) -> list[int]:
    return [rng.randrange(len(call["options"])) for call in problem["calls"]]


def brute_force(problem: Problem) -> float | None:
    """The least us_per_step of all feasible plans; None if there is none."""
    plans = itertools.product(*(range(len(call["options"])) for call in problem["calls"]))
    results = [evaluate(problem, named(problem, plan)) for plan in plans]
    return min((r["us_per_step"] for r in results if r["feasible"]), default=None)


def random_problem(seed: int) -> Problem:
    """Any graph: parents up to two steps back or none, transfers on either side or elsewhere, ties, tight memory."""
    rng = random.Random(seed)
    num_devices = rng.choice([2, 4, 4, 6])
    num_calls = rng.randint(1, 4)
    longest = rng.choice([3, 9, 50])
    calls: list[dict[str, Any]] = []
    for i in range(num_calls):
        options = []
        for _ in range(rng.randint(1, {1: 8, 2: 6, 3: 5, 4: 4}[num_calls])):
            size = rng.randint(1, num_devices)
            static = rng.randint(0, 30)
            options.append(
                {
                    "devices": [rng.randrange(num_devices - size + 1), size],
                    "strategy": rng.choice("abc"),
                    "time_us": rng.randint(0, longest),
                    "static_bytes": static,
                    "peak_bytes": static + rng.randint(0, 30),
                }
            )
        parents = [[f"call{j}", 0] for j in range(i) if rng.random() < 0.4]
        parents += [[f"call{j}", rng.randint(1, 2)] for j in range(num_calls) if rng.random() < 0.3]
        calls.append(
            {"name": f"call{i}", "model": "m", "trains": rng.random() < 0.5, "parents": parents, "options": options}
        )
    pairs = [f"{a}>{b}" for a in "abc" for b in "abc"]
    tables = {name: {pair: rng.randint(0, longest // 2) for pair in pairs} for name in ("m", "n")}
    transfers = []
    for number in range(rng.randint(0, 3)):
        source, target = rng.randrange(num_calls), rng.randrange(num_calls)
        name = f"transfer{number}"
        back = 0 if source < target else rng.randint(1, 2)
        # The edges go up the order of the calls, or back in time.
        transfers.append(
            {
                "name": name,
                "from": f"call{source}",
                "to": f"call{target}",
                "on": f"call{rng.choice([source, target, rng.randrange(num_calls)])}",
                "table": rng.choice(["m", "n"]),
                "parents": [[f"call{source}", 0]],
            }
        )
        if rng.random() < 0.8:
            calls[target]["parents"].append([name, back])
    return {
        "format": "planning-problem/1",
        "num_devices": num_devices,
        "devices_per_node": num_devices,
        "device_memory_bytes": rng.choice([50, 70, 1000]),
        "steps": rng.randint(1, 4),
        "calls": calls,
        "transfers": transfers,
        "tables": tables,
    }


def symmetric_problem(seed: int) -> Problem:
    """Every option exists on every aligned part of 8 devices, so that parts of the cluster can be exchanged."""
    rng = random.Random(seed)
    problem = random_problem(seed)
    problem["num_devices"] = problem["devices_per_node"] = 8
    problem["device_memory_bytes"] = rng.choice([60, 80, 1000])
    for call in problem["calls"]:
        call["options"] = [
            {**option, "devices": [first, size]}
            for size, option in zip(rng.sample([2, 4, 8], 3), call["options"], strict=False)
            for first in range(0, 8, size)
        ]
    return problem
