"""What the documentation says is so: commands run, files exist, examples work, messages are the code's."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from realhf import cli
from realhf.dataflow.plan import ExecutionPlan
from realhf.rundir.paths import RunDirectory
from realhf.rundir.status import read_status
from tests.docs.blocks import DOCUMENTS, ROOT, Document
from tests.docs.data_files import write_data_files
from tests.waiting import PATIENCE_S

DOCS = [Document(path) for path in DOCUMENTS]
# Pages whose commands test_recipes.py and test_from_others.py run.
ELSEWHERE = ("docs/recipes/", "docs/from_")
COMMANDS = {command for page in DOCS if not page.name.startswith(ELSEWHERE) for command in page.commands}
SMALL = "--steps 1 --batch-size 8 --no-evaluate --num-workers 1"

FEW, SOON = "--evaluations 1000", "--seconds 2"

# Commands that are run here, in this order, in one folder with a copy of experiments/ in it, and the words added
# to make them cheap (a later option wins).
RUN_HERE = {
    "realhf plan experiments/ppo.py --num-workers 4 --hardware cpu": FEW,
    "realhf plan experiments/ppo.py --num-workers 4 --output plan.json": FEW,
    "realhf profile experiments/ppo.py --num-workers 2 --only links,memory": "",
    "realhf plan experiments/ppo.py --plan plan.json": "",
    "realhf plan experiments/ppo.py --num-workers 2 --batch-size 8 --ppo.max-new-tokens 128 --staleness-up-to 2": FEW,
    "realhf plan experiments/ppo.py --nodes 2 --gpus-per-node 8 --hardware h100 --output h100.json": FEW,
    "realhf plan experiments/ppo.py --cluster h100-4x8,h100-8x8,h200-4x8 --actor llama3-70b --critic llama3-7b": SOON,
    "realhf plan experiments/ppo.py --cluster h100-1x8 --actor llama3-7b --critic llama3-7b "
    "--dump-problem problem.json": FEW,
    "realhf plan experiments/ppo.py --cluster h100-4x8 --actor llama3-7b --critic llama3-7b --new-tokens 4096 "
    "--response-lengths lengths.txt": FEW,
    "realhf search problem.json --seconds 5": "--seconds 1",
    "realhf plan experiments/ppo.py --cluster h100-8x8 --actor llama3-70b --critic llama3-7b --compare "
    "--html plan.html --json plan-numbers.json": SOON,
    "realhf run experiments/ppo.py --launcher slurm --nodes 2 --gpus-per-node 8 --hardware h100 --dry-run": FEW,
    "realhf run experiments/ppo.py --steps 10 --ppo.kl-coef 0.02 --run-dir runs/first": SMALL,
    "realhf status runs/first": "",
    "realhf status runs/first --samples": "",
    "realhf convert runs/first exported": "",
    "realhf report runs/first": "",
    "realhf verify runs/first --step 1": "",
    "realhf run reinforce.py --steps 1 --num-workers 1 --run-dir runs/reinforce": "--batch-size 8",
    "realhf compare runs/first runs/reinforce --html compare.html": "",
    "realhf run scored.py --steps 1 --num-workers 2 --run-dir runs/scored": "--batch-size 8",
    "realhf plan placed.py --num-workers 4 --output placed.json": FEW,
    "python -m realhf.data.sort_task runs/data --seed 0": "",
    "realhf run experiments/sft.py --num-workers 2 --run-dir runs/sft": "--steps 1 --batch-size 8 --no-evaluate",
    "realhf run grpo --model runs/sft --tokenizer runs/data --data runs/data/prompts.jsonl "
    "--reward experiments/sort_rewards.py:right --eval-data runs/data/evaluation.jsonl --eval-batch-size 256 "
    "--eval-temperature 1 --actor.lr 1e-4 --steps 60 --grpo.max-new-tokens 9 "
    "--num-workers 2": "--steps 1 --batch-size 8",
    "realhf run distill --model runs/sft --teacher runs/first --tokenizer runs/data --data runs/data/prompts.jsonl "
    "--distill.max-new-tokens 9 --num-workers 2": "--steps 1 --batch-size 8",
    "realhf run grpo --model runs/sft --tokenizer runs/data --data runs/data/prompts.jsonl "
    "--reward experiments/sort_rewards.py:right --eval-data runs/data/evaluation.jsonl --eval-every-steps 10 "
    "--stop-early reward_total --stop-early-patience 5 --keep-checkpoints 2 --run-dir runs/early": "--steps 3 "
    "--batch-size 8 --mini-batches 1 --grpo.max-new-tokens 9 --num-workers 1 --eval-every-steps 1 "
    "--stop-early-patience 1 --stop-early-gain 9 --eval-batch-size 256",
    "python -m realhf.data.look prompts --path questions.jsonl --tokenizer my-model": "",
    'python -m realhf.data.look prompts --path questions.jsonl --tokenizer my-model --as-chat --system "Be brief."': "",
    "python -m realhf.data.look examples --path chats.parquet --tokenizer my-model --loss-on all --rows 3": "",
    "python -m realhf.data.look pairs --path pairs --tokenizer my-model --max-tokens 200 --too-long drop": "",
    "realhf data --list": "",
    "realhf data reasoning-gym:chain_sum": "",
    "python -m realhf.data.sort_task sorting": "",
    "realhf run grpo.py --data sorting/prompts.jsonl --tokenizer sorting --reward sorted_rewards.py:in_order "
    "--run-dir runs/grpo": "--steps 1 --batch-size 8 --num-workers 1",
    "realhf run counted.py --data sorting/prompts.jsonl --tokenizer sorting --num-workers 2 --steps 1 "
    "--run-dir runs/counted": "",
    "realhf run probed.py --data sorting/prompts.jsonl --tokenizer sorting --texts.data sorting/sft.jsonl "
    "--reward sorted_rewards.py:in_order --num-workers 1 --steps 1 --run-dir runs/probed": (
        "--batch-size 8 --reinforce.max-new-tokens 8"
    ),
    "python train.py": "",
    "python experiments/live_programs.py tournament --steps 10": "--steps 2 --num-workers 1",
    "realhf --version": "",
    "realhf doctor": "",
    "torchrun --standalone --nproc-per-node 2 train_osdp.py": "",
    "torchrun --standalone --nproc-per-node 2 train_fully_shard.py": "",
    "realhf osdp llama3-7b --devices 8 --memory-gb 40": "",
    "make run": "--dry-run",
    "make real": "--dry-run",
    "make test": "--dry-run",
    "cd tests/slurm && ../../.venv/bin/python -m testbed --help": "",
    "cd tests/slurm && ../../.venv/bin/python -m hosts --help": "",
}

# These as a user runs them, by a shell; the other `realhf` commands in this process, runs with forked workers.
BY_SHELL = ("realhf run experiments/ppo.py --steps 10 ", "realhf --version", "realhf doctor")
FORKED = ("--launcher", "tests.e2e.forked:ForkedLauncher")

# Of them these take long and need no other one: they run with the slow tests.
TAKES_LONG = (
    "realhf plan experiments/ppo.py --cluster h100-4x8,h100-8x8,h200-4x8 ",
    "realhf plan experiments/ppo.py --cluster h100-8x8 --actor llama3-70b --critic llama3-7b --compare ",
    "realhf plan experiments/ppo.py --num-workers 2 --batch-size 8 --ppo.max-new-tokens 128 --staleness-up-to 2",
    "realhf profile ",
    "realhf doctor",
    "realhf plan experiments/ppo.py --nodes 2 --gpus-per-node 8 --hardware h100 --output h100.json",
    "realhf plan experiments/ppo.py --cluster h100-4x8 --actor llama3-7b --critic llama3-7b --new-tokens 4096 ",
    "torchrun ",
)

# Commands that another test runs for real: the file, and words of the command that are in it.
RUN_ELSEWHERE = {
    "realhf run grpo --model my-model --data reasoning-gym:chain_sum:max_terms=3,max_digits=2,size=2000 --eval-data "
    "reasoning-gym:chain_sum:max_terms=3,max_digits=2,size=200,seed=1 --grpo.max-new-tokens 16 --run-dir runs/sums": (
        "tests/e2e/test_tasks.py",
        ["experiments/grpo", '"--data", f"{TASK},size=64"', '"--eval-data", f"{TASK},size=64,seed=1"'],
    ),
    "realhf run experiments/ppo.py --run-dir runs/first --detach": (
        "tests/e2e/test_resume.py",
        ['realhf("run"', '"--detach")'],
    ),
    "realhf attach runs/first": ("tests/e2e/test_resume.py", ['realhf("attach", run_dir)']),
    "realhf run experiments/ppo.py --launcher slurm --nodes 2 --gpus-per-node 8 --hardware h100 --time-limit 24:00:00 "
    "--until-done": ("tests/slurm/test_life_of_a_job.py", ['command("run"', "--until-done", "--time-limit"]),
    "realhf run experiments/sft.py --run-dir runs/sft --launcher slurm --nodes 2 --gpus-per-node 8 --then "
    "experiments/reward.py --run-dir runs/reward --then experiments/ppo.py --model runs/sft --reward-model "
    "runs/reward": ("tests/slurm/test_chains.py", ["experiments/sft.py", '"--then", SFT', '"--model", first']),
    "realhf run experiments/ppo.py --seeds 4 --sweep ppo.kl-coef=0.01,0.1 --at-most 2 --launcher slurm --nodes 1 "
    "--gpus-per-node 8 --hardware h100": ("tests/slurm/test_chains.py", ['realhf("run"', '"--seeds"', '"--at-most"']),
    "realhf stop runs/first": ("tests/e2e/test_resume.py", ['command("stop", run_dir)']),
    "realhf plan experiments/ppo.py --cluster h100-16x8 --actor llama3-70b --critic llama3-7b --compare": (
        "tests/e2e/test_plan_command.py",
        ["experiments/ppo.py --cluster h100-16x8 --actor llama3-70b --critic llama3-7b --compare", "main(['plan'"],
    ),
    "realhf run experiments/sft.py --launcher in-process --num-workers 1 --steps 1": (
        "tests/e2e/test_contributed_launcher.py",
        ["experiments/sft.py", '"--launcher", "in-process", "--num-workers", "1"', '"--steps", "1"'],
    ),
    "realhf run experiments/ppo.py --plan plan.json --run-dir runs/mine": (
        "tests/e2e/test_plans.py",
        ["--plan", "finished", '"ppo"'],
    ),
    "realhf run experiments/ppo.py --launcher slurm --nodes 2 --gpus-per-node 8 --hardware h100": (
        "tests/slurm/test_main_job.py",
        ["experiments/ppo.py", "--launcher", "slurm", "--nodes", "--gpus-per-node"],
    ),
    "realhf run experiments/ppo.py --model path/to/tiny --reward-model path/to/tiny --new-value-head": (
        "tests/e2e/test_checkpoints.py",
        ['"ppo"', "--model", "--reward-model", "--new-value-head"],
    ),
    "realhf run experiments/ppo.py --backend transformers --model path/to/tiny "
    "--reward-model path/to/tiny --new-value-head": (
        "tests/e2e/test_transformers.py",
        ["finished(", "--backend transformers", "--model", "--reward-model", "--new-value-head"],
    ),
    "python -m benchmarks.lib.pages": ("tests/docs/test_figures.py", ['"-m", "benchmarks.lib.pages"']),
    "python benchmarks/papers.py": (
        "tests/benchmarks/test_papers.py",
        ['"benchmarks/papers.py"', '"--quick"', "subprocess.run("],
    ),
    "python -m build": ("tests/packaging/builds.py", ['"-m", "build"']),
    "python -m pip install dist/realhf-0.1.0.tar.gz": (
        "tests/packaging/test_wheel.py",
        ['"-m", "pip", "install", sdist'],
    ),
    "realhf profile experiments/ppo.py --num-workers 2": (
        "tests/distributed/test_profiler.py",
        ['"profile"', "--num-workers", "main("],
    ),
    "realhf profile experiments/ppo.py --launcher slurm --nodes 2 --gpus-per-node 8": (
        "tests/slurm/test_profile_nodes.py",
        ['user.realhf("profile"', '"--launcher", "slurm"', '"--gpus-per-node", "2"'],
    ),
    "realhf convert path/to/Qwen3-0.6B converted/qwen3": (
        "tests/unit/models/test_convert.py",
        ['"realhf.cli", "convert"', "checkpoint of 1 file"],
    ),
    "realhf convert runs/mine/checkpoints/latest/actor exported/actor --like path/to/Qwen3-0.6B": (
        "tests/unit/models/test_convert.py",
        ['"realhf.cli", "convert"', '"--like"'],
    ),
    "realhf run grpo --model SmolLM2-135M-Instruct.Q4_1.gguf --data train.jsonl --reward rewards.py:correct": (
        "tests/e2e/test_gguf.py",
        ['"run", "grpo", "--model", file.name', '"--data", "train.jsonl", "--reward", "rewards.py:correct"'],
    ),
    "realhf convert SmolLM2-135M-Instruct.Q4_1.gguf converted/smollm2": (
        "tests/e2e/test_gguf.py",
        ['cli.main(["convert", file.name, "converted"])'],
    ),
    "python scripts/gpu_check.py": (
        "tests/e2e/test_gpu_check.py",
        ["scripts/gpu_check.py", "def test_every_step_runs_in_small_on_a_cpu"],
    ),
    "python scripts/simulated_gpu.py SOURCES FOLDER": (
        "tests/simulated/test_setup.py",
        ['"scripts/simulated_gpu.py", sources, folder', "def test_the_folder_of_the_other_tests_is_complete"],
    ),
    # The tests themselves, where someone has built the folder.
    "REALHF_SIMULATED_GPU=FOLDER python -m pytest tests/simulated": (
        "tests/simulated/conftest.py",
        ["os.environ.get(FOLDER_VARIABLE)"],
    ),
    "realhf run grpo.py --model RUN_DIR --data sorting/prompts.jsonl --tokenizer sorting "
    "--reward sorted_rewards.py:in_order": (
        "tests/docs/test_docs.py",
        ["def test_the_tutorial_of_scripts", "realhf run grpo.py", "--model runs"],
    ),
    "realhf run grpo --model ./Qwen2.5-1.5B --data train.jsonl --reward rewards.py:correct": (
        "tests/docs/test_recipes.py",
        ["README.md", "realhf run grpo --model ./", "run_small(command)"],
    ),
    "realhf evaluate --model ./Qwen2.5-1.5B --data test.jsonl --reward rewards.py:correct": (
        "tests/e2e/test_evaluate.py",
        ['cli.main(["evaluate"', '"--model", "Llama-one"', '"--data", "rows.jsonl"', '"--reward", "rewards.py:even"'],
    ),
    "realhf evaluate --model ./Qwen2.5-1.5B --model runs/grpo --data test.jsonl --reward rewards.py:correct "
    "--json figures.json": (
        "tests/e2e/test_evaluate.py",
        ['cli.main(["evaluate"', '"--model", "Llama-one", "--model", "Llama-two"', '"--json", "both.json"'],
    ),
    "realhf run reinforce.py --num-workers 2 --steps 40 --model RUN_DIR": (
        "tests/docs/test_docs.py",
        ["def test_the_example_trains_under_two_workers", "reinforce.py", "--num-workers"],
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: the ready experiments, the files of docs/experiments.md, docs/scripts.md, docs/osdp.md,
    docs/live.md and docs/data.md."""
    path = tmp_path_factory.mktemp("docs")
    write_data_files(path)
    shutil.copytree(ROOT / "experiments", path / "experiments", ignore=shutil.ignore_patterns("__pycache__"))
    pages = [Document(ROOT / f"docs/{name}.md") for name in ("experiments", "scripts", "osdp", "live")]
    for block in (block for page in pages for block in page.blocks("python")):
        first, _, code = block.partition("\n")
        assert first.startswith("# file: "), f"a python block begins with '# file: NAME', not {first!r}"
        (path / first.removeprefix("# file: ")).write_text(code)
    return path


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a documented command as a user would, with this interpreter's environment in the PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_every_command_is_run_by_a_test() -> None:
    assert {*RUN_HERE, *RUN_ELSEWHERE} == COMMANDS
    for command, (file, words) in RUN_ELSEWHERE.items():
        text = (ROOT / file).read_text()
        missing = [word for word in words if word not in text]
        assert not missing, f"{file} does not run {command!r}: {missing} is not in it"


@pytest.mark.distributed
@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=pytest.mark.slow) if c.startswith(TAKES_LONG) else c for c in RUN_HERE]
)
def test_commands(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command)
    if words[0] == "realhf" and not command.startswith(BY_SHELL):
        monkeypatch.chdir(folder)
        forked = FORKED if words[1] == "run" and "--dry-run" not in words else ()
        assert cli.main([*words[1:], *shlex.split(RUN_HERE[command]), *forked]) == 0
    else:
        in_checkout = command.startswith(("make ", "cd "))
        done = shell(f"{command} {RUN_HERE[command]}", ROOT if in_checkout else folder)
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    if "--stop-early" in words:  # no reward rises by 9
        status = read_status(RunDirectory(folder / "runs/early").status)
        assert status is not None
        assert (status.state, status.step, status.message[:26]) == ("done", 1, "stopped early after step 1")
    for option in ("--output", "--run-dir", "--html", "--json"):
        if option in words:
            assert (folder / words[words.index(option) + 1]).exists()
    if words[:2] == ["realhf", "report"]:
        assert (folder / words[2] / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.distributed
def test_the_tutorial_of_scripts(folder: Path) -> None:
    """GRPO in at most 60 lines goes on from a run's model."""
    assert len((folder / "grpo.py").read_text().splitlines()) <= 60
    words = "--data sorting/prompts.jsonl --tokenizer sorting --reward sorted_rewards.py:in_order --num-workers 1"
    small = f"{words} --steps 1 --batch-size 8 --grpo.max-new-tokens 8"
    shell("python -m realhf.data.sort_task sorting", folder)
    for options in ("--run-dir runs/tutorial", "--model runs/tutorial --run-dir runs/tutorial-2"):
        done = shell(f"realhf run grpo.py {small} {options}", folder)
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.distributed
def test_the_example_trains_under_two_workers(folder: Path) -> None:
    words = "realhf run reinforce.py --num-workers 2"
    done = shell(f"{words} --steps 2 --run-dir runs/learnt", folder)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [msgspec.json.decode(line) for line in (folder / "runs/learnt/metrics.jsonl").read_bytes().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["grad_norm"] > 0 and 0 <= line["reward_mean"] <= 1 for line in lines)
    # From another run's checkpoint, as the page says.
    checkpoint = "--model runs/learnt"
    done = shell(f"{words} --steps 1 --run-dir runs/onwards {checkpoint}", folder)
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_plan_of_the_first_page_is_what_its_command_prints(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but its speed. What plans.md quotes is a line of it."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))  # without what other commands have measured
    command = "realhf plan experiments/ppo.py --num-workers 4 --hardware cpu"
    readme = Document(ROOT / "README.md")
    assert command in readme.commands
    [shown] = [block.splitlines() for block in readme.blocks("") if "\nexecution plan\n" in block]
    monkeypatch.chdir(folder)
    assert cli.main([*shlex.split(command)[1:], "--evaluations", "60000"]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    of_this_machine = "plans evaluated at"
    assert [line for line in shown if of_this_machine not in line] == [
        line for line in printed if of_this_machine not in line
    ]
    quoted = [block.strip() for block in Document(ROOT / "docs/plans.md").blocks("") if "is slower with" in block]
    assert len(quoted) == 1
    assert quoted[0] in printed


def test_the_example_of_a_pool_is_planned_within_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert cli.main(shlex.split(f"plan placed.py --num-workers 4 --output within.json {FEW}")) == 0
    assert "pool 'left' (devices 0-1): actor" in capsys.readouterr().out
    plan = msgspec.json.decode((folder / "within.json").read_bytes(), type=ExecutionPlan)
    assert all(set(call.mesh.devices) <= {0, 1} for call in plan.calls.values())
    by_hand = msgspec.json.decode((folder / "within.json").read_bytes())
    for call in by_hand["calls"].values():
        call |= {"devices": [2, 1], "dp": 1, "tp": 1, "pp": 1, "chunks": 1, "micro_batches": 1}
    (folder / "outside.json").write_bytes(msgspec.json.encode(by_hand))
    for words, message in (
        ("--num-workers 1", "pool 'left' (devices 0-1) has device 1, and there are 1"),
        ("--num-workers 4 --plan outside.json", "devices=[2, 1] are not all of pool 'left' (devices 0-1)"),
    ):
        assert cli.main(shlex.split(f"run placed.py --run-dir runs/refused {words}")) == 2
        assert message in " ".join(capsys.readouterr().err.split())
        assert not (folder / "runs/refused").exists()


@pytest.mark.parametrize("document", DOCS, ids=lambda document: document.name)
def test_links_lead_somewhere(document: Document) -> None:
    for link in document.links:
        file, _, anchor = link.partition("#")
        target = (document.path.parent / file).resolve() if file else document.path
        assert target.exists(), f"{document.name}: {link}"
        if anchor:
            assert anchor in Document(target).anchors, f"{document.name}: {link}"


# First parts of paths that are not in the checkout: of run directories, and what commands make.
NOT_HERE = ("runs/", "RUN_DIR/", "profiles/local/", ".venv/", "checkpoints/", "logs/", "rollouts/", "keys/")
NOT_HERE += ("evaluation/", "easy/", "hard/")  # names of statistics
NOT_HERE += ("rendezvous/", "activity/", "launcher/", "tensorboard/", "tokenizer/", "samples/", "execution-plan/")
NOT_HERE += ("program/",)
PATH = re.compile(r"\.?[\w.-]+(/[\w.-]*)+")
FILE = re.compile(r"[\w-]+\.(py|cpp|h)")


@pytest.mark.parametrize("document", [d for d in DOCS if d.name != "CHANGELOG.md"], ids=lambda document: document.name)
def test_files_that_are_mentioned_exist(document: Document) -> None:
    """The changelog names files of its time."""
    names = {path.name for folder in ("realhf", "csrc", "tests", "scripts") for path in (ROOT / folder).rglob("*.*")}
    names |= {block.split()[2] for page in DOCS for block in page.blocks("python") if block.startswith("# file: ")}
    for word in document.code_words:
        if PATH.fullmatch(word) and not word.startswith(NOT_HERE):
            assert (ROOT / word).exists(), f"{document.name}: {word}"
        elif FILE.fullmatch(word):
            assert word in names, f"{document.name}: {word}"


def test_every_module_folder_is_described() -> None:
    described = Document(ROOT / "docs/architecture.md").code_words
    folders = [f"realhf/{path.parent.name}/" for path in (ROOT / "realhf").glob("*/__init__.py")]
    assert not [folder for folder in folders if folder not in described]


def test_the_example_of_a_plan_is_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = [block for block in Document(ROOT / "docs/plans.md").blocks("json") if "num_devices" in block]
    plan = msgspec.json.decode(block, type=ExecutionPlan)
    assert plan.num_devices == 2
    (folder / "by_hand.json").write_text(block)
    monkeypatch.chdir(folder)
    assert cli.main(["plan", "experiments/ppo.py", "--plan", "by_hand.json"]) == 0


def test_the_fields_of_a_plan_are_all_described() -> None:
    described = set(Document(ROOT / "docs/plans.md").code_words)
    assert set(ExecutionPlan.__struct_fields__) <= described


def literal_texts(tree: ast.AST) -> Iterator[str]:
    """Every string of a module, with `…` where a value is put in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_are_those_of_the_code() -> None:
    texts = [text for path in (ROOT / "realhf").rglob("*.py") for text in literal_texts(ast.parse(path.read_text()))]
    document = Document(ROOT / "docs/troubleshooting.md")
    rows = re.findall(r"^\| `([^`]+)` \|", document.text, re.MULTILINE)
    assert len(rows) > 30
    from_libraries = {"Unrecognized options"}
    for row in rows:
        pieces = [piece for piece in row.split("…") if piece.strip(" ,;:=.()")]
        if row in from_libraries or not pieces:
            continue
        pattern = re.compile(".*".join(map(re.escape, pieces)), re.DOTALL)
        assert any(pattern.search(text) for text in texts), f"no message of the code is {row!r}"
