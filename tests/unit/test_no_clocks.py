"""No default test reads a clock: what took how long depends on what else the machine does."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
CLOCKS = {"monotonic", "perf_counter", "process_time", "time", "monotonic_ns", "perf_counter_ns", "time_ns"}
# Who waits with a deadline for the others; a testbed that people start, too.
MAY_READ = {
    "waiting.py",
    "distributed/pool.py",
    "simulated/simulator.py",
    "slurm/testbed/__main__.py",
    "slurm/testbed/cluster.py",
}
MAY_READ |= {"slurm/testbed/keeper.py", "slurm/hosts/host.py"}
# The moment of an activity lies between two readings of the same clock.
MAY_READ |= {"unit/rundir/test_flight_recorder.py"}


def measures(function: ast.AST) -> bool:
    decorators = getattr(function, "decorator_list", [])
    return any("mark.measures" in ast.unparse(decorator) for decorator in decorators)


def readings(node: ast.AST) -> list[int]:
    """Lines that read a clock, but for those of tests that measure."""
    if measures(node):
        return []
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr=attribute)) if attribute in CLOCKS:
            return [node.lineno]
    return [line for child in ast.iter_child_nodes(node) for line in readings(child)]


def test_no_default_test_reads_a_clock() -> None:
    files = {str(path.relative_to(TESTS)): path for path in sorted(TESTS.rglob("*.py"))}
    found = {
        name: lines
        for name, path in files.items()
        if name not in MAY_READ and not name.startswith("gpu/") and (lines := readings(ast.parse(path.read_text())))
    }
    assert not found, "give the code a clock to be told by, count what it does, or mark the test `measures`"
    assert files.keys() >= MAY_READ


def test_readings_are_seen() -> None:
    tree = ast.parse(
        "def test_a():\n    start = time.monotonic()\n@pytest.mark.measures\ndef test_b():\n    time.time()\n"
    )
    assert readings(tree) == [2]
