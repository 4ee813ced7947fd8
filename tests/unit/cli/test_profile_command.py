"""What `realhf profile --launcher slurm` makes of its command line and of what SLURM tells."""

from argparse import Namespace
from typing import Any

import pytest

from realhf.api.experiment import AutoSettings
from realhf.base.errors import UserError
from realhf.cli import parser
from realhf.cli.profile import described, node_options, size_of, with_links
from realhf.launch.slurm import launcher as slurm_launcher
from realhf.launch.slurm.launcher import SlurmLauncher
from realhf.launch.slurm.offer import Nodes, Offer
from realhf.profiling.measure import ProfileRequest

OFFER = Offer(
    nodes=(
        Nodes(partition="gpu", is_default=True, count=4, cpus=64, memory_mb=1, gpus={"h100": 8}),
        Nodes(partition="gpu", count=9, cpus=64, memory_mb=1),
        Nodes(partition="mixed", count=4, cpus=64, memory_mb=1, gpus={"h100": 4}),
        Nodes(partition="mixed", count=4, cpus=64, memory_mb=1, gpus={"a100": 2, "v100": 6}),
    )
)
NOTHING = AutoSettings(batch_size=8)


@pytest.fixture(autouse=True)
def _offer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_launcher, "ask", lambda: OFFER)


def parsed(*words: str) -> Namespace:
    return parser("profile").parse_args(["sft", "--launcher", "slurm", *words])


def size(*words: str, **settings: Any) -> tuple[int, int]:
    arguments = parsed(*words)
    return size_of(arguments, SlurmLauncher(node_options(arguments)), AutoSettings(batch_size=8, **settings))


@pytest.mark.parametrize(
    ("words", "settings", "expected"),
    [
        ((), {}, (2, 8)),
        (("--only", "network"), {}, (2, 8)),
        (("--only", "links,layers"), {}, (1, 8)),
        (("--nodes", "3", "--gpus-per-node", "4"), {"nodes": 5, "gpus_per_node": 1}, (3, 4)),
        ((), {"launcher": "slurm", "nodes": 5, "gpus_per_node": 1}, (5, 1)),
        ((), {"launcher": "in-process", "nodes": 1, "gpus_per_node": 1}, (2, 8)),
        (("--partition", "mixed", "--gpu-type", "a100"), {}, (2, 2)),
        (("--cpu-only", "--gpus-per-node", "3"), {}, (2, 3)),
    ],
)
def test_the_size_of_the_job(words: tuple[str, ...], settings: dict[str, Any], expected: tuple[int, int]) -> None:
    assert size(*words, **settings) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--partition", "mixed"),
            "slurm does not tell one number of GPUs for all nodes; give --gpus-per-node",
        ),
        (("--cpu-only",), "--launcher slurm does not tell how many workers a node is to have; give --gpus-per-node"),
        (("--nodes", "0"), "--nodes 0 is not from 1"),
        (("--nodes", "1", "--only", "links,network"), "and --nodes is 1; give --nodes 2"),
        (("--num-workers", "4"), "--num-workers 4 is for this machine; with --launcher slurm give --nodes and"),
        (("--until-done",), "--until-done is for a run, which goes on from a checkpoint"),
        (("--notice-s", "5"), "--notice-s is for a run"),
    ],
)
def test_what_cannot_be(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        size(*words)


def test_links_are_measured_where_there_are_any() -> None:
    """Where the user names nothing."""
    assert with_links(ProfileRequest(), 2, 8).words == ("links", "network", "layers")
    assert with_links(ProfileRequest(), 1, 8).words == ("links", "layers")
    assert with_links(ProfileRequest(), 2, 1).words == ("network", "layers")
    assert with_links(ProfileRequest(only="memory"), 2, 8).words == ("memory",)


def test_the_nodes_are_described_as_a_run_plans_them() -> None:
    """GPUs without a name are described by the nodes."""
    of_cpu, of_name = described(None, True, 2, 4, None), described("a100-80g", False, 2, 8, None)
    assert of_cpu is not None
    assert (of_cpu.name, of_cpu.threads) == ("cpu", 1)
    assert of_name is not None
    assert of_name.name == "a100-80g"
    assert described(None, False, 2, 8, None) is None
