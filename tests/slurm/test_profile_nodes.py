"""`realhf profile --launcher slurm`: layers on a node, links within and between nodes; plans take them."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from hosts.cluster import Hosts
from testbed.cluster import Testbed

from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.measured import constants_path, load_constants, with_measured
from realhf.planning.model.profile import load_profile
from tests.e2e.runs import ROOT, command
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slurm

SMALL = ("--repetitions", "2", "--max-tokens", "64", "--batch-size", "8")
ON_CPUS = ("--launcher", "slurm", "--cpu-only", "--gpus-per-node", "1")
BETWEEN_NODES = {"inter_node_bandwidth", "inter_node_send_bandwidth", "inter_node_latency_s"}


class User:
    """Somebody on a login node, in a folder that the nodes share, with a home of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder / "work", folder / "home"
        self.folder.mkdir()
        self.env = {**os.environ, "XDG_DATA_HOME": str(self.home)}

    def words(self, subcommand: str, *words: str) -> list[str]:
        return command(subcommand, ROOT / "experiments/sft.py", "--data-dir", self.folder.parent / "data", *words)

    def realhf(self, subcommand: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.words(subcommand, *words), cwd=self.folder, env=self.env, capture_output=True, text=True,
            timeout=PATIENCE_S, check=False,
        )  # fmt: skip

    @property
    def profiles(self) -> Path:
        """Where plans look."""
        return self.home / "realhf/profiles"

    def leaves_nothing(self) -> bool:
        return not self.profiles.exists() and not any(self.folder.iterdir())


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path)


@pytest.mark.slow
def test_plans_take_what_the_nodes_have_measured(slurm_testbed: Testbed, user: User) -> None:
    done = user.realhf("profile", *SMALL, *ON_CPUS, "--gpus-per-node", "2", "--network-interface", "lo")
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(r"job \d+: (PENDING|RUNNING)", done.stderr)
    assert slurm_testbed.run("squeue", "-h").stdout == ""
    assert not any(user.folder.iterdir()), "the job's directory is gone"
    found = load_constants(constants_path("cpu", user.profiles))
    assert set(found.constants) == BETWEEN_NODES | {"intra_node_bandwidth", "intra_node_latency_s"}
    assert str(found.measured["network"]).endswith("between node1, node2")
    (path,) = set((user.profiles / "cpu").glob("*.json")) - {constants_path("cpu", user.profiles)}
    profile = load_profile(path)
    assert [timings.tp for timings in profile.tensor] == [1, 2], "the workers of one node, not those of both"
    assert {timings.group_size for timings in profile.collectives} == {2}

    taken = with_measured(load_hardware("cpu"), user.profiles)
    assert taken.inter_node_bandwidth == found.constants["inter_node_bandwidth"].value
    planned = user.realhf("plan", "--nodes", "2", "--gpus-per-node", "2", "--hardware", "cpu", "--batch-size", "8")
    assert planned.returncode == 0, planned.stderr
    assert "from measured layer timings" in planned.stdout
    source = f"links between nodes: {taken.inter_node_bandwidth / 1e9:.3g} GB/s a device, "
    assert source in planned.stdout
    assert f"measured {found.measured['network']}" in planned.stdout


@pytest.mark.slow
def test_a_run_on_nodes_without_gpus_is_planned_with_what_was_measured(slurm_testbed: Testbed, user: User) -> None:
    assert user.realhf("profile", *SMALL, *ON_CPUS, "--network-interface", "lo", "--only", "network").returncode == 0
    found = load_constants(constants_path("cpu", user.profiles))
    small = ("--nodes", "2", "--steps", "1", "--batch-size", "8", "--no-evaluate", "--network-interface", "lo")
    run = user.realhf("run", *small, *ON_CPUS)
    assert run.returncode == 0, run.stderr[-4000:]
    assert "planned for 2 x 1 cpu with " in run.stderr
    rate = found.constants["inter_node_bandwidth"].value / 1e9
    assert f"links between nodes: {rate:.3g} GB/s a device, " in run.stderr
    assert f"measured {found.measured['network']}" in run.stderr


def test_refusals_leave_nothing(slurm_testbed: Testbed, user: User) -> None:
    for words, message in (
        (("--only", "network"), "--only network measures between two nodes, and this is one machine; on a login node"),
        ((*ON_CPUS, "--only", "network", "--nodes", "1"), "and --nodes is 1; give --nodes 2"),
        ((*ON_CPUS, "--partition", "gup"), "--partition gup: the cluster has main, urgent"),
        ((*ON_CPUS, "--nodes", "3"), "--nodes 3: partition main has 2 nodes"),
        ((*ON_CPUS, "--until-done"), "--until-done is for a run"),
        (("--launcher", "slurm", "--cpu-only"), "slurm does not tell how many workers a node is to have; give"),
        (("--nodes", "2"), "--nodes 2 is for --launcher slurm"),
    ):
        refused = user.realhf("profile", *words)
        assert refused.returncode == 2, (words, refused.stderr)
        assert message in refused.stderr
        assert user.leaves_nothing(), words
    assert slurm_testbed.run("squeue", "-h").stdout == ""


@pytest.mark.slow
def test_a_failure_keeps_the_logs_and_names_them(slurm_testbed: Testbed, user: User) -> None:
    failed = user.realhf("profile", *SMALL, *ON_CPUS, "--only", "network", "--network-interface", "ib7")
    assert failed.returncode == 1, failed.stderr
    assert "--network-interface ib7: " in failed.stderr
    (kept,) = (user.folder / "runs").iterdir()
    assert f"logs of the job are kept in {kept}" in failed.stderr
    assert "ib7" in (kept / "logs/worker-0.log").read_text()
    assert not user.profiles.exists()
    assert slurm_testbed.run("squeue", "-h").stdout == ""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_cancels_the_job(slurm_testbed: Testbed, user: User, number: signal.Signals) -> None:
    output = user.folder.parent / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            user.words("profile", *ON_CPUS, "--network-interface", "lo", "--repetitions", "1000"),
            cwd=user.folder, env=user.env, stdout=file, stderr=file,
        )  # fmt: skip
    wait_until(lambda: "RUNNING" in output.read_text(), output.read_text)
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == 130
    assert slurm_testbed.run("squeue", "-h").stdout == ""
    assert user.leaves_nothing()


# What goes out of a host is limited, everything counted that is on the wire. A message begins with up to 256 KiB
# that the limiter has saved up, 3 % of the 8 MiB that a device sends at most at once. Ethernet, IP and TCP take 5 % of
# full frames, and TCP loses some more where the limiter drops what it does not queue.
RATE, BYTES_PER_S = "200mbit", 200e6 / 8
LEAST, MOST = 0.7, 1.05


@pytest.mark.slow
@pytest.mark.parametrize("per_node", [1, 2])
def test_a_slow_link_is_measured_as_it_is(hosts: Hosts, tmp_path: Path, per_node: int) -> None:
    """And devices that share it have a part of it each. Without an interface it is that of the first host's name."""
    profiles, interface = tmp_path / "profiles", () if per_node == 1 else ("--network-interface", "fab0")
    for name in ("host1", "host2"):
        hosts.network.rate(hosts[name], RATE)
    try:
        done = hosts.run(
            *command("profile", "experiments/sft.py", "--only", "network", "--repetitions", "3", "--launcher", "slurm"),
            *("--cpu-only", "--nodes", "2", "--gpus-per-node", str(per_node), *interface),
            *("--profiles-dir", str(profiles), "--run-dir", str(tmp_path / "job"), "--nodelist", "host[1-2]"),
        )
    finally:
        for name in ("host1", "host2"):
            hosts.network.rate(hosts[name], "")
    assert done.returncode == 0, done.stdout[-4000:]
    assert hosts.run("squeue", "-h").stdout == ""
    found = load_constants(constants_path("cpu", profiles))
    expected = BYTES_PER_S / per_node
    for name in ("inter_node_bandwidth", "inter_node_send_bandwidth"):
        assert LEAST * expected < found.constants[name].value < MOST * expected, (name, found)
    assert 0 < found.constants["inter_node_latency_s"].value < 0.1


@pytest.mark.slow
def test_nodes_that_cannot_reach_each_other_are_named(hosts: Hosts, tmp_path: Path) -> None:
    hosts.network.drop(hosts["host2"], "ip saddr 10.77.0.11 tcp dport 20000-65535 tcp flags & (syn | ack) == syn")
    try:
        done = hosts.run(
            *command("profile", "experiments/sft.py", "--only", "network", *ON_CPUS, "--network-interface", "fab0"),
            *("--profiles-dir", str(tmp_path / "profiles"), "--run-dir", str(tmp_path / "job")),
            *("--nodelist", "host[1-2]"),
        )
    finally:
        hosts.network.undrop(hosts["host2"])
    assert done.returncode == 1, done.stdout
    assert re.search(r"worker 0 on host1 \(10\.77\.0\.11, fab0\) cannot reach worker 1 on host2 at ", done.stdout)
    assert f"logs of the job are kept in {tmp_path / 'job'}" in done.stdout
    assert hosts.run("squeue", "-h").stdout == ""
