"""What is read of sbatch's answers, what a job takes from the environment, and which words sbatch is not given."""

from dataclasses import replace
from pathlib import Path

import pytest

from realhf import cli
from realhf.base.errors import UserError
from realhf.launch.process import Job, ProcessSpec
from realhf.launch.slurm.defaults import with_environment
from realhf.launch.slurm.sbatch_words import check_sbatch_words
from realhf.launch.slurm.script import SlurmOptions
from realhf.launch.slurm.submission import job_number, submit
from realhf.rundir.paths import RunDirectory


@pytest.mark.parametrize(
    ("printed", "number"),
    [
        ("17\n", "17"),
        ("17;alpha\n", "17"),
        ("Welcome to Alpha. 3 of 10 TiB are used.\n2026\n17\n", "17"),
        ("17\n--> project lab has 1234 hours left\n", "17"),
        ("Submitted batch job 17\n", "17"),
        ("Submitted batch job 17 on cluster alpha\n", "17"),
        ("sbatch: job 17 was refused\n", None),
        ("", None),
    ],
)
def test_a_job_s_number_among_other_lines(printed: str, number: str | None) -> None:
    assert job_number(printed) == number


def test_defaults_of_the_environment_become_options_and_what_is_given_counts() -> None:
    environment = {
        "SBATCH_PARTITION": "theirs",
        "SBATCH_ACCOUNT": "lab",
        "SBATCH_QOS": "low",
        "SBATCH_EXPORT": "NONE",
        "SBATCH_ARRAY_INX": "0-3",
        "PATH": "/bin",
        "NCCL_DEBUG": "INFO",
        "HF_TOKEN": "secret",
        "CUDA_VISIBLE_DEVICES": "3",
        "REALHF_WORKER_INDEX": "1",
        "EDITOR": "vi",
    }
    got = with_environment(SlurmOptions(partition="mine", sbatch=("--qos=high",)), environment)
    expected = SlurmOptions(
        partition="mine",
        account="lab",
        sbatch=("--qos=low", "--qos=high"),  # of two the last counts
        environment=(("NCCL_DEBUG", "INFO"), ("PATH", "/bin")),
    )
    assert got == expected


def test_a_batch_script_has_what_tasks_need_and_no_secret() -> None:
    """The script is a file that others may read."""
    needed = "PATH LD_LIBRARY_PATH PYTHONPATH VIRTUAL_ENV CONDA_PREFIX HOME USER LOGNAME LANG LC_ALL XDG_CACHE_HOME"
    needed += " REALHF_GPUS HF_HOME TORCH_HOME NCCL_DEBUG GLOO_SOCKET_IFNAME UCX_TLS CUDA_HOME OMP_NUM_THREADS"
    needed += " TRACKIO_DIR REALHF_WITHOUT"
    left_out = "HF_TOKEN HF_HUB_TOKEN_PATH TORCH_SECRET NCCL_PASSWORD REALHF_API_KEY CUDA_VISIBLE_DEVICES"
    left_out += " REALHF_WORKER_INDEX REALHF_DEVICE REALHF_EXITS REALHF_LOGS REALHF_STOP REALHF_LAUNCH_ID"
    left_out += " AWS_SECRET_ACCESS_KEY WANDB_API_KEY MYPATH PATHS XDG_HOME EDITOR"
    environment = dict.fromkeys((*needed.split(), *left_out.split()), "value")
    assert dict(with_environment(SlurmOptions(), environment).environment) == dict.fromkeys(needed.split(), "value")


def test_each_default_of_the_environment_is_taken() -> None:
    names = ["PARTITION", "ACCOUNT", "TIMELIMIT", "QOS", "CONSTRAINT", "RESERVATION", "WCKEY"]
    got = with_environment(SlurmOptions(), {f"SBATCH_{name}": name.lower() for name in names} | {"SBATCH_MEM": ""})
    assert (got.partition, got.account, got.time_limit) == ("partition", "account", "timelimit")
    assert got.sbatch == ("--qos=qos", "--constraint=constraint", "--reservation=reservation", "--wckey=wckey")
    mine = SlurmOptions(partition="a", account="b", time_limit="5")
    kept = with_environment(mine, {f"SBATCH_{name}": "x" for name in names[:3]})
    assert (kept.partition, kept.account, kept.time_limit) == ("a", "b", "5")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--array=0-1", "--array is not for a run: a run is one job; give --seeds or --sweep"),
        ("-a 0-1", "-a is not for a run"),
        ("--qos=high --arr=0-1", "--array is not for a run"),
        ("--clusters=b", "submit on a login node of that cluster"),
        ("--cpus-per-task=8", "give --cpus-per-worker"),
        ("--gpus=8", "give --gpus-per-node and --gpu-type"),
        ("array=0-1", "is no sbatch option"),
    ],
)
def test_options_that_make_another_job_are_refused(words: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        SlurmOptions(sbatch=("--nice", words))


def test_every_option_that_the_launcher_gives_itself_is_refused() -> None:
    taken = "array clusters wait wrap test-only cpus-per-task nodes ntasks ntasks-per-node gres gpus gpus-per-node"
    names = [f"--{name}" for name in [*taken.split(), "gpus-per-task", "output", "error"]]
    for name in [*names, *["-a", "-M", "-W", "-c", "-N", "-n", "-G", "-o", "-e"]]:
        with pytest.raises(UserError, match=f"--sbatch .*{name} is not for a run: "):
            check_sbatch_words(f"{name}=1" if name.startswith("--") else f"{name}1")
    for text in ("--nice\n--qos=a", "qos"):
        with pytest.raises(UserError, match="is no sbatch option; write one as --name=value"):
            check_sbatch_words(text)
    check_sbatch_words("--ar=0")  # as short as this it is no beginning of a name that is looked for


def test_options_that_a_job_may_have() -> None:
    words = ("--qos=high", "-C fast", "--export=NONE", "--mem-per-cpu=4G", "--wait-all-nodes=1", "--exclusive")
    assert SlurmOptions(sbatch=words).sbatch == words


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"mem": "12X"}, "--mem 12X is no size; .* 64G"),
        ({"gpu_type": "a100:2"}, "--gpu-type a100:2 is no name"),
        ({"gpu_type": "a100", "cpu_only": True}, "asks for GPUs, --cpu-only for none"),
        ({"setup_lines": ("a\nb",)}, "is not one line"),
        ({"srun": ("--comment='a",)}, "No closing quotation"),
        ({"cpus_per_worker": 0}, "--cpus-per-worker 0 is not from 1 to"),
    ],
)
def test_values_that_cannot_be_are_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        replace(SlurmOptions(), **wrong)  # type: ignore[arg-type]


def test_without_slurm_it_is_said_before_a_plan_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ("experiments/ppo.py", "--launcher", "slurm", "--cpu-only", "--run-dir", str(tmp_path / "run"))
    assert cli.main(["run", *words]) == 2
    said = capsys.readouterr().err
    assert said == "error: sbatch was not found: is this a machine of a SLURM cluster? else use --launcher local\n"
    assert not (tmp_path / "run").exists()


def test_a_controller_that_is_away_is_no_fault_of_the_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
    program = f"#!/bin/sh\necho '{said}' >&2\nexit 1\n"
    for name in ("sbatch", "squeue"):
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    directory = RunDirectory.create(tmp_path / "run")
    processes = (ProcessSpec(name="master", argv=("m",)), ProcessSpec(name="worker-0", argv=("w",)))
    job = Job(directory=directory, processes=processes, workers_per_node=1, start_id="first")
    with pytest.raises(
        UserError, match=r"^SLURM's controller does not answer, and nothing was submitted \(sbatch: err"
    ):
        submit(SlurmOptions(cpu_only=True), job)
