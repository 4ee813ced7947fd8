"""Which nodes SLURM has for a run, from what sinfo shows, and what the launcher asks of it."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from realhf.base.errors import UserError
from realhf.launch.process import Job, ProcessSpec
from realhf.launch.slurm import launcher as launcher_module
from realhf.launch.slurm import offer as offer_module
from realhf.launch.slurm import state as state_module
from realhf.launch.slurm.launcher import SlurmLauncher, read_nodes, without_nodes
from realhf.launch.slurm.offer import Nodes, Offer, ask, read_accounting
from realhf.launch.slurm.offer import read_nodes as read_partitions
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

    def command(*words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        called.append(words)
        assert timeout_s == (3 if words[0] in ("sinfo", "sacctmgr") and "--Node" not in words else 60)
        key = "hostnames" if "hostnames" in words else "qos" if "name,maxwall" in words[-1] else words[0]
        return subprocess.CompletedProcess(words, 0 if key in texts else 1, texts.get(key, ""), "")

    for module in (launcher_module, offer_module, state_module):
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

    def failing(*words: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, 1, "main*|up|infinite|2|8|16000|(null)|(null)\n", "")

    monkeypatch.setattr(offer_module, "slurm_command", failing)
    assert ask() == Offer(), "what a command prints that has failed counts for nothing"

    def missing(*words: str, timeout_s: float) -> None:
        raise UserError(f"{words[0]} was not found")

    monkeypatch.setattr(offer_module, "slurm_command", missing)
    assert ask() == Offer()


def job(folder: Path, nodes: int = 2, **more: Any) -> Job:
    names = ("master", *map(worker_name, range(2 * nodes)))
    processes = tuple(ProcessSpec(name=name, argv=("true",)) for name in names)
    return Job(directory=RunDirectory.create(folder), processes=processes, workers_per_node=2, **more)


def test_an_array_runs_the_script_of_each_of_its_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    submitted: list[Path] = []

    def submit(script: Path, options: SlurmOptions, of: Job) -> str:
        assert of is jobs[0]
        submitted.append(script)
        return "20"

    monkeypatch.setattr(launcher_module, "submit_script", submit)
    jobs = [job(tmp_path / name, start_id="first") for name in ("a", "b", "c")]
    launcher = SlurmLauncher(SlurmOptions(cpu_only=True))
    assert launcher.start_array(jobs, tmp_path, 2) == ["20_0", "20_1", "20_2"]
    [script] = submitted
    alone = jobs[:1]
    assert (launcher.start_array(alone, tmp_path / "a", None), len(submitted)) == (["20_0"], 2)
    text = script.read_text()
    assert "#SBATCH --array=0-2%2\n" in text
    assert [str(each.directory.script) in text and each.directory.script.is_file() for each in jobs] == [True] * 3


def test_room_and_lost_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = "n1 idle main*\nn2 down main*\nn3 mixed main*\nn4 idle other\n"
    shown = "JobId=17 JobState=FAILED NodeList=n[1-2] "
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
    assert called[-1][-1] == "--partition=other"
    here = SlurmLauncher(SlurmOptions(cpu_only=True))
    here.start(job(tmp_path / "third", nodes=4, nodelist="n[1-4]"))
    assert here.room(frozenset()) == 6  # two on each of three that can be used, of whatever partition
    assert called[-1][-1] == "--nodes=n[1-4]"
    mine = SlurmLauncher(SlurmOptions(cpu_only=True, nodelist="n9"))
    mine.start(job(tmp_path / "fourth", nodes=4, nodelist="n[1-4]"))
    mine.room(frozenset())
    assert called[-1][-1] == "--nodes=n9", "what is asked for beside the experiment counts"
    answers(monkeypatch, sinfo=rows.replace("*", "") + "\n", scontrol=shown, hostnames="n1\nn2\n")
    assert launcher.room(frozenset()) == 6  # there is no default partition
    answers(monkeypatch, scontrol=shown, hostnames="n1\nn2\n")  # sinfo does not answer
    assert (launcher.room(frozenset()), launcher.lost()) == (6, frozenset())
    for texts in (
        {"scontrol": "JobState=PENDING NodeList=(null) "},
        {"hostnames": "n1"},
        {"scontrol": "JobState=PENDING "},
    ):
        answers(monkeypatch, **texts)
        assert launcher.place(0) is None
    launcher.leave()
    answers(monkeypatch, scontrol=shown, hostnames="n1\nn2\n")
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


def test_nodes_where_something_failed_are_not_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called = answers(monkeypatch, hostnames="n1\nn2\nn3\n")
    assert without_nodes("n[1-3]", ("n2", "n9")) == ("n1,n3", None)
    assert called == [("scontrol", "show", "hostnames", "n[1-3]")]
    of = job(tmp_path / "a", nodelist="n[1-3]", avoided=frozenset({"n2"}))
    assert "#SBATCH --nodelist=n1,n3\n" in SlurmLauncher(SlurmOptions(cpu_only=True)).preview(of)
    both = job(tmp_path / "b", avoided=frozenset(f"n{index}" for index in range(1, 9)))
    assert "#SBATCH --exclude=n1,n2,n3,n4,n5,n6,n7,n8\n" in SlurmLauncher(SlurmOptions(cpu_only=True)).preview(both)
    asked = job(tmp_path / "c", nodelist="n[1-3]")
    assert "#SBATCH --nodelist=n7\n" in SlurmLauncher(SlurmOptions(cpu_only=True, nodelist="n7")).preview(asked)


def test_a_cluster_is_asked_once_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "fast")
    nodes = "main*|up|infinite|2|33|16000|gpu:a:4|(null)\nfast|up|infinite|2|8|9|gpu:a:1|x\nfast|up|1|2|9|9|gpu:b:2|x\n"
    called = answers(monkeypatch, sbatch="slurm 22.05", sinfo=nodes)
    launcher = SlurmLauncher(SlurmOptions(gpu_type="a"))
    launcher.check()
    assert "--cpus-per-task=7 " in launcher.preview(job(tmp_path / "a"))  # of the partition and the type
    assert called[0] == ("sbatch", "--version")
    assert [words[0] for words in called].count("sinfo") == 1
    with pytest.raises(UserError, match=r"^SLURM has no such job: --partition no: the cluster has main, fast$"):
        SlurmLauncher(SlurmOptions(partition="no")).check()


def test_a_job_is_started_and_taken_up_with_what_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Submitted:
        is_waiting = False

        def __init__(self, options: SlurmOptions, job: Job, job_id: str = "18") -> None:
            if job.name == "refused":
                raise UserError("refused")
            made.append((options.exclude, job, job_id))
            self.id = job_id

        def poll(self) -> list[Any]:
            return made

    made: list[Any] = []
    monkeypatch.setattr(launcher_module, "SubmittedJob", Submitted)
    launcher, of = SlurmLauncher(SlurmOptions(cpu_only=True)), job(tmp_path / "a", avoided=frozenset({"n2"}))
    launcher.start(of)
    launcher.adopt(of, "17")
    assert made == [("n2", of, "18"), ("n2", of, "17")]
    assert (launcher.job_id(), launcher.is_waiting(), launcher.poll()) == ("17", False, made)
    with pytest.raises(UserError, match="refused"):
        launcher.start(job(tmp_path / "b", name="refused"))
    assert launcher.job_id() == "", "nothing is left of the job before"


@pytest.mark.parametrize(
    ("associations", "qos", "expected"),
    [
        (
            ["lab|high,low", "lab|low", "other|"],
            ["high|1:00", "low|", "else|2"],
            (("lab", "other"), {"high": "1:00", "low": ""}),
        ),
        (["lab|"], ["high|1:00", "low|"], (("lab",), {"high": "1:00", "low": ""})),  # whoever may name any
        ([" lab|high "], [" high|1 "], (("lab",), {"high": "1"})),
        (["lab|high|x", "lab"], ["high|1|x", "high"], (None, None)),
        (["lab|none"], ["high|1"], (("lab",), None)),
    ],
)
def test_what_a_user_may_name(associations: list[str], qos: list[str], expected: tuple[Any, Any]) -> None:
    assert read_accounting(associations, qos) == expected


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("main|up|n/a|2+|8+|16000+|gpu:2|a,b", ("main", False, True, "", 2, 8, 16000, {"": 2}, {"a", "b"})),
        ("main*|inact|1:00|2|8|16000|(null)||more", ("main", True, False, "1:00", 2, 8, 16000, {}, set())),
        ("main|up|1:00|2|8|16000|(null)", None),
        ("main|up|1:00|x|8|16000|(null)|", None),
        ("main|up|1:00|2|8|x|(null)|", None),
    ],
)
def test_a_line_of_sinfo(line: str, found: tuple[Any, ...] | None) -> None:
    names = ("partition", "is_default", "is_up", "time_limit", "count", "cpus", "memory_mb", "gpus", "features")
    assert read_partitions(["header", line]) == (
        () if found is None else (Nodes(**dict(zip(names, found, strict=True))),)
    )


def test_nodes_in_words() -> None:
    node = Nodes(partition="main", count=1, cpus=8, memory_mb=1536, gpus={"a": 2, "": 1})
    assert (node.is_default, node.is_up, node.time_limit) == (False, True, "")
    assert str(node) == "1 node with 8 CPUs, 1.5 GiB, 2 GPUs of type a, 1 GPUs"
