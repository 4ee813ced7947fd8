"""The batch script, against a recorded one and against bash's own reading of it."""

import difflib
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from realhf.base.code_files import python_command
from realhf.base.errors import UserError
from realhf.launch.process import Job, ProcessSpec
from realhf.launch.slurm.defaults import with_environment
from realhf.launch.slurm.script import SlurmOptions, sbatch_text
from realhf.launch.slurm.submission import array_text
from realhf.rundir.paths import RunDirectory, worker_name

FOLDER = Path(__file__).parent
RECORD = "REALHF_RECORD_GOLDEN"

OPTIONS = SlurmOptions(
    cpus_per_worker=4,
    partition="main",
    account="lab",
    time_limit="1-00:00:00",
    nodelist="node[01-02]",
    mem="64G",
    gpu_type="a100",
    setup_lines=("module load cuda/12.4", "source '/opt/my env/activate'"),
    srun=("--mpi=none", "apptainer exec --nv '/images/my image.sif'"),
    sbatch=("--qos=high",),
    environment=(("HF_HOME", "/shared/hf"), ("PATH", "/opt/it's here:/usr/bin")),
)
DIRECTORY = RunDirectory(Path("/shared/runs/100% mine"))


def command(module: str) -> tuple[str, ...]:
    """As the launcher starts a module, with another interpreter."""
    return ("python", *python_command(module, str(DIRECTORY.path))[1:])


def job(num_workers: int = 4) -> Job:
    env = {"OMP_NUM_THREADS": "1", "NOTE": "it's $HOME"}
    master = ProcessSpec(name="master", argv=command("realhf.master"))
    workers = (
        ProcessSpec(name=name, argv=command("realhf.worker"), env=env) for name in map(worker_name, range(num_workers))
    )
    processes = (master, *workers)
    return Job(name="ppo", directory=DIRECTORY, processes=processes, workers_per_node=2, takes_notice=True)


def without_master() -> Job:
    return replace(job(), processes=job().workers, takes_notice=False)


def later() -> Job:
    """Of a stage of a chain, which its job plans."""
    again = ("python", "-P", "-m", "realhf.cli.in_job", "/run")
    return replace(job(), after="17", is_made_ready_there=True, again=again)


@pytest.mark.parametrize(
    ("golden", "options", "of"),
    [
        ("job.sbatch.golden", OPTIONS, job()),
        ("job_plain.sbatch.golden", SlurmOptions(cpu_only=True), job()),
        ("job_workers.sbatch.golden", SlurmOptions(cpu_only=True), without_master()),
        ("job_later.sbatch.golden", SlurmOptions(cpu_only=True), later()),
    ],
)
def test_the_text_is_as_recorded(golden: str, options: SlurmOptions, of: Job) -> None:
    check_recorded(golden, sbatch_text(options, of))


def test_the_text_of_an_array_is_as_recorded() -> None:
    text = sbatch_text(OPTIONS, job())
    scripts = [Path(f"/shared/runs/100% mine/seed-{seed}/launcher/job.sbatch") for seed in range(3)]
    check_recorded("array.sbatch.golden", array_text([text] * 3, scripts, at_most=2))


def test_the_runs_of_an_array_have_one_size() -> None:
    texts = [sbatch_text(SlurmOptions(cpu_only=True), job(workers)) for workers in (2, 4)]
    scripts = [Path(f"/runs/{name}/launcher/job.sbatch") for name in ("a", "b")]
    with pytest.raises(UserError, match=r"b differs from a: #SBATCH --nodes=1, #SBATCH --nodes=2; start them by"):
        array_text(texts, scripts)


def check_recorded(golden: str, text: str) -> None:
    file = FOLDER / golden
    if os.environ.get(RECORD):
        file.write_text(text)
    diff = "".join(difflib.unified_diff(file.read_text().splitlines(True), text.splitlines(True), "recorded", "now"))
    assert not diff, (
        f"{diff}\nif this is intended, record it: {RECORD}=1 pytest {Path(__file__).name}; then read the diff"
    )


@pytest.mark.parametrize("of", [job(), without_master()], ids=["with master", "workers alone"])
def test_bash_accepts_it(of: Job) -> None:
    text = sbatch_text(OPTIONS, of)
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_machines_without_gpus_are_asked_for_none() -> None:
    text = sbatch_text(replace(OPTIONS, cpu_only=True, gpu_type=None, srun=()), job())
    assert "gres" not in text
    assert "gpu" not in text


def test_what_is_not_given_is_left_to_the_cluster() -> None:
    text = sbatch_text(SlurmOptions(), job())
    for option in ("partition", "account", "time", "qos"):
        assert f"--{option}" not in text
    assert "#SBATCH --nodelist" not in text


def test_the_number_of_workers_has_to_fit() -> None:
    with pytest.raises(UserError, match="3 workers are no whole nodes of 2 workers each; change --nodes, "):
        sbatch_text(OPTIONS, job(3))


@pytest.mark.parametrize("wrong", [{"cpus_per_worker": 0}, {"sbatch": ("qos=high",)}])
def test_options_are_checked_when_made(wrong: dict[str, int]) -> None:
    with pytest.raises(UserError):
        replace(OPTIONS, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("90", 5400), ("90:30", 5430), ("1:30:00", 5400), ("1-2", 93_600), ("1-02:30", 95_400), ("UNLIMITED", None)],
)
def test_a_time_limit_is_read_as_slurm_does(limit: str, seconds: float | None) -> None:
    assert SlurmOptions(time_limit=limit).limit_s == seconds


def test_the_notice_comes_within_the_time_limit() -> None:
    assert "#SBATCH --signal=B:USR1@120\n" in sbatch_text(SlurmOptions(), job())
    assert "#SBATCH --signal=B:USR1@75\n" in sbatch_text(SlurmOptions(time_limit="5"), job())
    assert "#SBATCH --signal=B:USR1@200\n" in sbatch_text(SlurmOptions(time_limit="5", notice_s=200), job())
    with pytest.raises(UserError, match=r"--notice-s 300 is not within --time-limit 5; lower it"):
        SlurmOptions(time_limit="5", notice_s=300)


def test_a_run_until_its_end_may_be_requeued() -> None:
    text = sbatch_text(SlurmOptions(until_done=True), replace(job(), again=("python", "-m", "again")))
    assert "#SBATCH --requeue\n" in text
    assert r"\"goes_on\":true" in text
    assert "    python -m again\n    code=$?\n" in text


SECRETS = {
    "HF_TOKEN": "hidden",
    "HUGGING_FACE_HUB_TOKEN": "hidden",
    "HF_TOKEN_PATH": "hidden",
    "HF_API_KEY": "hidden",
    "HF_APIKEY": "hidden",
    "HF_PASSWORD": "hidden",
    "HF_passwd": "hidden",
    "HF_USER_PASS": "hidden",
    "REALHF_JUDGE_SECRET": "hidden",
    "REALHF_SECRET_NAME": "hidden",
    "NCCL_CREDENTIALS": "hidden",
    "UCX_AUTH": "hidden",
    "HF_ENDPOINT": "https://user:hidden@mirror/",
    "TORCH_HOME": "https://hidden@mirror/",
    "WANDB_API_KEY": "hidden",
    "AWS_SECRET_ACCESS_KEY": "hidden",
    "OPENAI_API_KEY": "hidden",
    "JUDGE_TOKEN": "hidden",
    "SSH_AUTH_SOCK": "hidden",
    "DATABASE_URL": "hidden",
    "WHATEVER": "hidden",
}
NEEDED = {"PATH": "/usr/bin", "HF_HOME": "/shared/hf", "NCCL_DEBUG": "INFO", "HF_ENDPOINT": "https://mirror/a@b"}


@pytest.mark.parametrize("name", SECRETS)
def test_no_secret_of_the_environment_stands_in_the_script(name: str) -> None:
    options = with_environment(SlurmOptions(cpu_only=True), {**NEEDED, name: SECRETS[name]})
    text = sbatch_text(options, job())
    assert "hidden" not in text
    for kept in NEEDED.keys() - {name}:
        assert f"export {kept}={NEEDED[kept]}\n" in text
    # What is passed on is named there; `--export=ALL` of a step is the environment of the script, not of who submits.
    assert "#SBATCH --export" not in text


def steps(text: str) -> list[list[str]]:
    """The words of each srun of a script."""
    lines = (line.split() for line in text.replace("\\\n", " ").splitlines())
    return [words[words.index("srun") + 1 :] for words in lines if "srun" in words]


@pytest.mark.parametrize("of", [job(), without_master(), later()], ids=["job", "workers", "later"])
def test_a_task_that_fails_ends_its_step_and_a_lost_node_ends_the_job(of: Job) -> None:
    text = sbatch_text(SlurmOptions(cpu_only=True), of)
    running = [words for words in steps(text) if '"$task"' in words]
    assert len(running) == len({process.name == "master" for process in of.processes})
    for words in running:
        assert "--kill-on-bad-exit=1" in words
        assert not {"--no-kill", "-k", "--kill-on-bad-exit=0", "-K0"} & set(words)
    assert "--no-kill" not in text
    assert "#SBATCH --no-requeue\n" in text


def test_the_tasks_of_an_array_may_all_run_at_once() -> None:
    text = array_text([sbatch_text(SlurmOptions(cpu_only=True), job())], [Path("/run/launcher/job.sbatch")])
    assert "#SBATCH --array=0-0\n" in text


def test_what_is_asked_unless_something_else_is() -> None:
    options = SlurmOptions()
    assert (options.queue_timeout_s, options.end_timeout_s, options.controller_timeout_s) == (86_400, 60, 600)
    assert (options.poll_interval_s, options.cpu_only, options.until_done, options.plan_in_job) == (
        2,
        False,
        False,
        False,
    )
    assert (options.setup_lines, options.srun, options.sbatch, options.environment) == ((), (), (), ())
    text = sbatch_text(replace(options, cpu_only=True, end_timeout_s=7.6), job())
    assert 'then wait_for "$other" 8; else wait_for "$other" 60; fi' in text


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("cpus_per_worker", 1, 4096), ("notice_s", 1, 86_400), ("queue_timeout_s", 0, 31_536_000)],
)
def test_numbers_have_a_least_and_a_largest_value(name: str, least: float, most: float) -> None:
    for value in (least, most):
        assert getattr(SlurmOptions(**{name: value}), name) == value  # type: ignore[arg-type]
    for value in (least - 1, most + 1):
        with pytest.raises(UserError, match=f"--{name.replace('_', '-')} {value} is not from {least} to"):
            SlurmOptions(**{name: value})  # type: ignore[arg-type]


def test_the_notice_of_a_short_job_is_a_quarter_of_it_and_a_second_at_least() -> None:
    for limit, notice_s in (("0:02", 1), ("0:30", 8), ("8", 120), ("7", 105), ("1-0", 120)):
        assert f"#SBATCH --signal=B:USR1@{notice_s}\n" in sbatch_text(SlurmOptions(time_limit=limit), job())
    assert SlurmOptions(time_limit="5", notice_s=299).notice_s == 299
    assert SlurmOptions(time_limit="UNLIMITED", notice_s=299).limit_s is None


def test_a_job_has_a_worker_at_least_and_workers_that_differ_in_name_alone() -> None:
    with pytest.raises(UserError, match="0 workers are no whole nodes of 2"):
        sbatch_text(OPTIONS, job(0))
    first, *others = job().processes
    for wrong in (replace(others[1], argv=("x",)), replace(others[1], env={"A": "1"})):
        with pytest.raises(AssertionError, match="worker-1 differs from worker-0"):
            sbatch_text(OPTIONS, replace(job(), processes=(first, others[0], wrong, *others[2:])))


@pytest.mark.parametrize("line", ["a\nb", " ", ""])
def test_a_line_is_one_and_not_empty(line: str) -> None:
    for name in ("srun", "setup_lines"):
        with pytest.raises(UserError, match="is not one line; give --srun and --setup-line once for each"):
            SlurmOptions(**{name: (line,)})  # type: ignore[arg-type]
