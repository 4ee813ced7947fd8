"""Which nodes SLURM has for a run, from what sinfo shows."""

from realhf.launch.slurm.launcher import read_nodes, without_nodes


def test_nodes_that_take_jobs() -> None:
    states = ["idle", "mixed", "allocated", "completing", "idle~", "mixed#", "down", "idle*", "drained", "draining"]
    states += ["fail", "unknown*", "maint", "idle$"]
    rows = [(f"node{i}", state, "all*") for i, state in enumerate(states, start=1)]
    assert read_nodes(rows) == ["node1", "node2", "node3", "node4", "node5", "node6", "node14"]
    assert read_nodes([("node1", "idle", "a"), ("node1", "idle", "b*")]) == ["node1"]


def test_what_is_asked_for_without_some_nodes() -> None:
    assert without_nodes(None, ()) == (None, None)
    assert without_nodes("node[1-3]", ()) == ("node[1-3]", None)
    assert without_nodes(None, ("node2", "node5")) == (None, "node2,node5")
