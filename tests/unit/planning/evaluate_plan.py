"""What a planning-problem/1 file means: the evaluation of one plan, plain and slow, as an oracle for the engine."""

import heapq
from typing import Any

Problem = dict[str, Any]


def evaluate(problem: Problem, plan: dict[str, int]) -> dict[str, Any]:
    """Makespan, time a step and peak memory of {call: option index}, by the rules of the format."""
    options = {call["name"]: call["options"][plan[call["name"]]] for call in problem["calls"]}
    devices = {name: range(o["devices"][0], sum(o["devices"])) for name, o in options.items()}
    nodes = [
        (call["name"], options[call["name"]]["time_us"], devices[call["name"]], call["parents"])
        for call in problem["calls"]
    ]
    for transfer in problem["transfers"]:
        source, target = options[transfer["from"]], options[transfer["to"]]
        pair = f"{source['strategy']}>{target['strategy']}"
        stays = source["strategy"] == target["strategy"] and source["devices"] == target["devices"]
        duration = 0 if stays else problem["tables"][transfer["table"]][pair]
        nodes.append((transfer["name"], duration, devices[transfer["on"]], transfer["parents"]))

    makespan = _makespan(nodes, problem["steps"], problem["num_devices"])
    peak = max(_need(device, options, devices) for device in range(problem["num_devices"]))
    return {
        "makespan_us": makespan,
        "us_per_step": makespan / problem["steps"],
        "peak_bytes": peak,
        "feasible": peak <= problem["device_memory_bytes"],
    }


def _makespan(nodes: list[Any], steps: int, num_devices: int) -> int:
    """Nodes are taken in the order of readiness; ties: the earlier step, then the order of the file."""
    order = {name: i for i, (name, *_) in enumerate(nodes)}
    details = {name: (duration, where) for name, duration, where, _ in nodes}
    waits: dict[tuple[int, str], int] = {}
    ready_at: dict[tuple[int, str], int] = {}
    children: dict[tuple[int, str], list[tuple[int, str]]] = {}
    queue: list[tuple[int, int, int, str]] = []
    for step in range(steps):
        for name, _, _, parents in nodes:
            earlier = [(step - back, parent) for parent, back in parents if step >= back]
            waits[step, name], ready_at[step, name] = len(earlier), 0
            for parent in earlier:
                children.setdefault(parent, []).append((step, name))
            if not earlier:
                heapq.heappush(queue, (0, step, order[name], name))
    free_at = [0] * num_devices
    makespan = done = 0
    while queue:
        ready, step, _, name = heapq.heappop(queue)
        duration, where = details[name]
        end = max([ready, *(free_at[d] for d in where)]) + duration
        for d in where:
            free_at[d] = end
        makespan, done = max(makespan, end), done + 1
        for child in children.get((step, name), []):
            ready_at[child] = max(ready_at[child], end)
            waits[child] -= 1
            if not waits[child]:
                heapq.heappush(queue, (ready_at[child], child[0], order[child[1]], child[1]))
    assert done == steps * len(nodes), "the graph has a cycle"
    return makespan


def _need(device: int, options: dict[str, Any], devices: dict[str, range]) -> int:
    here = [option for name, option in options.items() if device in devices[name]]
    if not here:
        return 0
    return sum(o["static_bytes"] for o in here) + max(o["peak_bytes"] - o["static_bytes"] for o in here)
