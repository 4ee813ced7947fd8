"""Runs over hosts of their own: no shared memory, networks of their own, and what happens there."""

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from hosts.cluster import FAKETIME_LIBRARY, SLURM_PORT, SLURMD_PORT, Hosts, Names

from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from tests.e2e.runs import ROOT, FinishedRun, command, finished, realhf
from tests.e2e.test_faults import StartedRun
from tests.e2e.test_resume import JOB, MODELS, statistics
from tests.slurm.test_restarts import TWO_NODES
from tests.waiting import wait_until

pytestmark = pytest.mark.slurm

# A sum of two is the same bits in any order, so that gloo gives those of shared memory.
BOTH, THIRD = CallPlan(devices=(0, 2), dp=2), CallPlan(devices=(2, 1))
THREE_HOSTS = ExecutionPlan(
    num_devices=3,
    devices_per_node=1,
    calls={
        "actor_generate": CallPlan(devices=(0, 2), tp=2),
        "actor_train_step": BOTH,
        "reference_inference": CallPlan(devices=(0, 1)),
        "reward_inference": THIRD,
        "critic_inference": THIRD,
        "critic_train_step": THIRD,
    },
)
ON_HOSTS = ("--launcher", "slurm", "--gpus-per-node", "1", "--cpu-only", "--network-interface", "fab0")
STEPS = ("--steps", "6", "--checkpoint-every", "2", "--reference-eta", "0.1")
Start = Callable[..., StartedRun]


def check_equal(run: FinishedRun, reference: FinishedRun) -> None:
    """The same bits, but for what was measured."""
    assert statistics(run) == statistics(reference)
    for model, config in MODELS.items():
        assert torch.equal(run.parameters(model, config), reference.parameters(model, config)), model


@pytest.mark.slow
def test_three_hosts_give_the_bits_of_one(hosts: Hosts, tmp_path: Path) -> None:
    save_plan(THREE_HOSTS, tmp_path / "plan.json")
    small = ("--steps", "2", "--reference-eta", "0.1", "--plan", tmp_path / "plan.json")
    reference = finished(tmp_path / "reference", JOB, *small)
    words = command("run", f"experiments/{JOB}.py", "--run-dir", tmp_path / "run", *small, "--nodes", "3", *ON_HOSTS)
    with named(hosts, host1="loopback", host2="unknown"):  # the interface is given, so that names do not count
        done = hosts.run(*words)
    assert done.returncode == 0, done.stdout[-4000:]
    check_equal(FinishedRun(tmp_path / "run"), reference)
    for worker in range(3):
        log = (tmp_path / f"run/logs/worker-{worker}.log").read_text()
        assert f"worker {worker} on host{worker + 1} shares memory with workers [] and reaches 2 other hosts" in log
    assert hosts.run("squeue", "-h").stdout == ""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    save_plan(TWO_NODES, path)
    return path


@pytest.fixture(scope="module")
def reference(plan: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return finished(tmp_path_factory.mktemp("reference") / "run", JOB, *STEPS, "--plan", plan)


@contextlib.contextmanager
def named(hosts: Hosts, **names: Names) -> Iterator[None]:
    """Inside, names resolve on these hosts as said."""
    for name, how in names.items():
        hosts.name_hosts(name, how)
    try:
        yield
    finally:
        for name in names:
            hosts.name_hosts(name, "known")


def started_and_ended(hosts: Hosts, run_dir: Path, plan: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A short run on two hosts, without an interface."""
    words = ("--steps", "2", "--plan", str(plan), "--nodes", "2", "--cpu-only", "--gpus-per-node", "1", *words)
    done = hosts.run(*command("run", f"experiments/{JOB}.py", "--run-dir", run_dir, *words, "--launcher", "slurm"))
    assert hosts.run("squeue", "-h").stdout == ""
    return done


@pytest.mark.slow
@pytest.mark.parametrize("names", ["loopback", "unknown"])
def test_a_master_without_an_address_says_what_to_give(hosts: Hosts, plan: Path, tmp_path: Path, names: Names) -> None:
    with named(hosts, host1=names):
        refused = started_and_ended(hosts, tmp_path / "refused", plan)
        accepted = started_and_ended(hosts, tmp_path / "accepted", plan, "--master-address", "10.77.0.11")
    assert refused.returncode == 1, refused.stdout
    assert "its interfaces are" in refused.stdout
    assert "fab0 10.77.0.11" in refused.stdout
    assert "by --network-interface, or the master's address by --master-address" in refused.stdout
    assert accepted.returncode == 0, accepted.stdout[-4000:]


@pytest.mark.slow
def test_workers_that_cannot_reach_each_other_name_both_hosts(hosts: Hosts, plan: Path, tmp_path: Path) -> None:
    """Nobody can open a connection to host2; host1, where the master is, can be reached."""
    hosts.network.drop(hosts["host2"], "ip saddr 10.77.0.11 tcp dport 20000-65535 tcp flags & (syn | ack) == syn")
    try:
        done = started_and_ended(hosts, tmp_path / "run", plan, "--network-interface", "fab0")
    finally:
        hosts.network.undrop(hosts["host2"])
    cannot = r"worker 0 on host1 \(10\.77\.0\.11, fab0\) cannot reach worker 1 on host2 at 10\.77\.0\.12 port \d+ "
    assert done.returncode == 1, done.stdout
    assert re.search(cannot + r"\(fab0\): no answer within 20 s", done.stdout), done.stdout


@pytest.mark.slow
def test_a_master_that_a_worker_cannot_reach(hosts: Hosts, plan: Path, tmp_path: Path) -> None:
    """It listens on the decoy, which is an interface of its host like any other."""
    done = started_and_ended(hosts, tmp_path / "run", plan, "--master-address", "192.168.101.1")
    assert done.returncode == 1, done.stdout
    ends = r"worker 1 on host2 ends: the master at tcp://192\.168\.101\.1:\d+ did not answer within 4\d s"
    assert re.search(ends, done.stdout), done.stdout
    assert "by --network-interface (here: " in done.stdout


@pytest.fixture
def start(hosts: Hosts, plan: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a run on two of the three hosts, which recovers; nothing of it survives the test.

    It returns after the second checkpoint; the sixth step waits until `fault`, a file beside the run, is gone.
    """
    started: list[StartedRun] = []

    def start(*words: str, wanted: str = "hold 5", **env: str) -> StartedRun:
        run_dir, output, fault = tmp_path / "run", tmp_path / "output.txt", tmp_path / "fault"
        fault.write_text(wanted)
        words = ("--plan", str(plan), "--recover", "auto", "--fault-file", str(fault), "--nodes", "2", *STEPS, *words)
        begun = command("run", f"experiments/{JOB}.py", "--run-dir", run_dir, *words, *ON_HOSTS)
        with output.open("wb") as file:
            process = subprocess.Popen(
                hosts["host0"].command(*begun),
                cwd=ROOT,
                env={**hosts.environment, "OMP_NUM_THREADS": "1", **env},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        started.append(StartedRun(run_dir, process, output))

        def is_saved() -> bool:
            assert process.poll() is None, started[-1].text
            return (run_dir / "checkpoints/step-4").exists()

        wait_until(is_saved, lambda: f"the second checkpoint:\n{started[-1].text}")
        return started[-1]

    yield start
    for run in started:
        for left in run.living():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # it may have ended meanwhile
                left.kill()
        run.process.wait()
    hosts.run("scancel", "--me")


def kinds(run: StartedRun) -> list[str]:
    """What happened to it as a whole, but for checkpoints."""
    lines = (run.path / "events.jsonl").read_text().splitlines()
    return [kind for kind in (json.loads(line)["event"] for line in lines) if kind not in ("checkpoint", "drift")]


def end_well(run: StartedRun, reference: FinishedRun) -> list[str]:
    """Lets the sixth step go on; the events of the run, which has ended with the bits of the reference."""
    (run.path.parent / "fault").unlink()
    assert run.end() == 0, run.text
    check_equal(FinishedRun(run.path), reference)
    return kinds(run)


@pytest.mark.slow
def test_short_faults_of_the_network_are_no_failure(hosts: Hosts, start: Start, reference: FinishedRun) -> None:
    """Each host cut off, each port closed in turn, and at last all ports of workers while they need them."""
    run, network = start(), hosts.network
    for name in ("host1", "host2"):
        network.silence(hosts[name])
        time.sleep(10)
        network.unsilence(hosts[name])
    master = json.loads((run.path / "rendezvous/master.json").read_bytes())["address"].rpartition(":")[2]
    for name, port in (("host1", master), ("host2", SLURMD_PORT), ("host0", SLURM_PORT)):
        network.drop(hosts[name], f"tcp dport {port}")
        time.sleep(6)
        network.undrop(hosts[name])
    network.drop(hosts["host2"], "ip saddr 10.77.0.11 tcp dport 10000-65535")
    (run.path.parent / "fault").write_text("")
    time.sleep(6)
    network.undrop(hosts["host2"])
    assert end_well(run, reference) == ["started", "ended"]


@pytest.mark.slow
def test_a_partition_that_heals_in_the_restarted_run(hosts: Hosts, start: Start, reference: FinishedRun) -> None:
    """What is on its side ends late, and touches nothing of the new start. The master is on host1."""
    run, name, worker = start(), "host2", 1
    before = (run.path / "launcher/start").read_text().strip()
    stale = run.find("realhf.worker", worker)
    hosts.network.silence(hosts[name])
    try:
        wait_until(lambda: "restarted" in kinds(run), lambda: run.text)
        wait_until((run.path / "activity/worker-1").exists, lambda: run.text)
        assert stale.is_running()
    finally:
        hosts.network.unsilence(hosts[name])
    wait_until(lambda: not stale.is_running(), "the end of the earlier worker")
    assert end_well(run, reference) == ["started", "failed", "restarted", "ended"]
    assert (run.path / "logs" / before / f"worker-{worker}.log").exists()
    assert all(f"on {name} " not in (run.path / f"logs/worker-{i}.log").read_text() for i in range(2))
    hosts.resume(name)


@pytest.mark.slow
def test_a_worker_ends_by_itself_when_its_master_is_gone(hosts: Hosts, start: Start) -> None:
    run = start("--master-timeout-s", "15", "--recover", "never")
    worker = run.find("realhf.worker", 1)
    log = run.path / "logs/worker-1.log"
    hosts.network.silence(hosts["host2"])
    try:
        wait_until(lambda: not worker.is_running(), lambda: log.read_text())
    finally:
        hosts.network.unsilence(hosts["host2"])
    assert "worker 1 on host2 ends: nothing was heard of the master at tcp://10.77.0.11:" in log.read_text()
    hosts.resume("host2")


@pytest.mark.slow
def test_a_run_goes_on_elsewhere_after_a_power_loss(hosts: Hosts, start: Start, reference: FinishedRun) -> None:
    run = start()
    # SLURM may have chosen others than the first two, where one has only just come back.
    nodes = hosts.run("squeue", "-h", "-o", "%N").stdout.strip()
    _, lost = hosts.run("scontrol", "show", "hostnames", nodes).stdout.split()
    try:
        hosts.fail(lost)
        assert end_well(run, reference) == ["started", "failed", "restarted", "ended"]
        assert hosts.run("squeue", "-h").stdout == ""
    finally:
        hosts.start(lost, ends_with_caller=True)
        hosts.resume(lost)


@pytest.mark.slow
def test_clocks_that_differ(hosts: Hosts, start: Start) -> None:
    """Times of calls are by the master's clock, and a run whose clock is not the reader's is no lost one."""
    hosts.set_clock("host1", "+100s")
    hosts.set_clock("host2", "-100s")
    try:
        run = start("--steps", "25", wanted="", LD_PRELOAD=FAKETIME_LIBRARY)  # sleep fails under libfaketime: no hold
        status = json.loads(realhf("status", run.path, "--json").stdout)
        assert run.end() == 0, run.text
    finally:
        for name in ("host1", "host2"):
            hosts.set_clock(name, "")
    assert status["state"] == "running", run.text
    starts = [line.partition(" INFO")[0] for line in map(first_line, ("worker-0", "worker-1"), [run.path] * 2)]
    assert starts[0][:16] != starts[1][:16], "the clocks do differ"
    for line in FinishedRun(run.path).metrics:
        assert max(call["seconds"] for call in line["calls"].values()) < 90, line
        assert 0 < line["time_s"] < 90, line


def first_line(name: str, path: Path) -> str:
    return (path / f"logs/{name}.log").read_text().partition("\n")[0]


@pytest.mark.slow
def test_a_slow_link_changes_no_bits(hosts: Hosts, start: Start, reference: FinishedRun) -> None:
    hosts.network.rate(hosts["host2"], "50mbit")
    try:
        assert end_well(start(), reference) == ["started", "ended"]
    finally:
        hosts.network.rate(hosts["host2"], "")
