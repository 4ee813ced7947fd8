"""Which nodes SLURM has for a run, from what sinfo shows, and what the launcher asks of it."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from realhf.launch.process import Job, ProcessSpec
from realhf.launch.slurm import launcher as launcher_module
from realhf.launch.slurm import offer as offer_module
from realhf.launch.slurm.launcher import SlurmLauncher, read_nodes, without_nodes
from realhf.launch.slurm.offer import Nodes, Offer, ask
from realhf.launch.slurm.script import SlurmOptions
from realhf.rundir.paths import RunDirectory, worker_name


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


def answers(monkeypatch: pytest.MonkeyPatch, **texts: str) -> list[tuple[str, ...]]:
    """Has SLURM's commands print texts, by name; one without a text fails. Returns what is called."""
    called: list[tuple[str, ...]] = []

    def command(*words: str, **_: Any) -> subprocess.CompletedProcess[str]:
        called.append(words)
        key = "hostnames" if "hostnames" in words else "qos" if "name,maxwall" in words[-1] else words[0]
        return subprocess.CompletedProcess(words, 0 if key in texts else 1, texts.get(key, ""), "")

    for module in (launcher_module, offer_module):
        monkeypatch.setattr(module, "slurm_command", command)
    return called


def test_what_a_cluster_has_is_asked_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(
        monkeypatch, sinfo="main*|up|infinite|2|8|16000|(null)|(null)\n", sacctmgr="lab|high\n", qos="high|1:00\nlow|\n"
    )
    node = Nodes(partition="main", is_default=True, count=2, cpus=8, memory_mb=16000)
    assert ask() == Offer(nodes=(node,), accounts=("lab",), qos={"high": "1:00"})
    answers(monkeypatch)
    assert ask() == Offer()


def job(folder: Path, nodes: int = 2, **more: Any) -> Job:
    names = ("master", *map(worker_name, range(2 * nodes)))
    processes = tuple(ProcessSpec(name=name, argv=("true",)) for name in names)
    return Job(directory=RunDirectory.create(folder), processes=processes, workers_per_node=2, **more)


def test_an_array_runs_the_script_of_each_of_its_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    submitted: list[Path] = []

    def submit(script: Path, options: SlurmOptions, of: Job) -> str:
        submitted.append(script)
        return "20"

    monkeypatch.setattr(launcher_module, "submit_script", submit)
    jobs = [job(tmp_path / name, start_id="first") for name in ("a", "b", "c")]
    launcher = SlurmLauncher(SlurmOptions(cpu_only=True))
    assert launcher.start_array(jobs, tmp_path, 2) == ["20_0", "20_1", "20_2"]
    [script] = submitted
    text = script.read_text()
    assert "#SBATCH --array=0-2%2\n" in text
    assert [str(each.directory.script) in text and each.directory.script.is_file() for each in jobs] == [True] * 3


def test_room_and_lost_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = "n1 idle main*\nn2 down main*\nn3 mixed main*\nn4 idle other\n"
    shown = "JobId=17 NodeList=n[1-2] "
    called = answers(monkeypatch, sinfo=rows, scontrol=shown, hostnames="n1\nn2\n")
    monkeypatch.setattr(launcher_module, "SubmittedJob", lambda options, job: type("Submitted", (), {"id": "17"}))
    launcher = SlurmLauncher(SlurmOptions(cpu_only=True))
    launcher.start(job(tmp_path / "run", nodes=3))
    assert [launcher.place(worker) for worker in range(6)] == ["n1", "n1", "n2", "n2", None, None]
    assert launcher.lost() == {"n2"}
    assert launcher.room(frozenset()) == 4  # two workers on each of n1 and n3, of the default partition
    assert launcher.room(frozenset({"n1"})) == 2
    asked = SlurmLauncher(SlurmOptions(cpu_only=True, partition="other"))
    asked.start(job(tmp_path / "second", nodes=1))
    assert asked.room(frozenset()) == 2  # of three nodes, as many as there are workers
    assert ("--partition=other") in called[-1]
    answers(monkeypatch, scontrol=shown, hostnames="n1\nn2\n")  # sinfo does not answer
    assert (launcher.room(frozenset()), launcher.lost()) == (6, frozenset())
    answers(monkeypatch, scontrol="JobId=17 NodeList=(null) ")
    assert launcher.place(0) is None


def test_a_job_is_stopped_or_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Submitted:
        id, is_waiting = "17", True

        def __init__(self, options: SlurmOptions, job: Job, job_id: str = "") -> None: ...

        def stop(self, grace_s: float) -> None:
            graces_s.append(grace_s)

        def status(self) -> str:
            return "job 17: PENDING"

    graces_s: list[float] = []
    monkeypatch.setattr(launcher_module, "SubmittedJob", Submitted)
    launcher = SlurmLauncher(SlurmOptions(cpu_only=True))
    launcher.stop(grace_s=1.0)  # nothing was started
    assert (launcher.job_id(), launcher.status(), launcher.is_waiting(), launcher.poll()) == ("", "", False, [])
    launcher.start(job(tmp_path / "run"))
    assert (launcher.job_id(), launcher.status(), launcher.is_waiting()) == ("17", "job 17: PENDING", True)
    launcher.stop(grace_s=3.0)
    launcher.stop()
    launcher.leave()
    launcher.stop(grace_s=4.0)
    assert graces_s == [3.0, 5.0]


def test_workers_have_their_share_of_the_cpus_where_there_are_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers(monkeypatch, sinfo="main*|up|infinite|2|33|16000|gpu:a:4|(null)\n")
    assert "--cpus-per-task=8 " in SlurmLauncher(SlurmOptions()).preview(job(tmp_path / "a"))
    assert "--cpus-per-task=3 " in SlurmLauncher(SlurmOptions(cpus_per_worker=3)).preview(job(tmp_path / "b"))
    assert "--cpus-per-task=8 " not in SlurmLauncher(SlurmOptions(cpu_only=True)).preview(job(tmp_path / "c"))
    with_exclude = SlurmLauncher(SlurmOptions(cpu_only=True)).preview(job(tmp_path / "d", avoided=frozenset({"n2"})))
    assert "#SBATCH --exclude=n2\n" in with_exclude
