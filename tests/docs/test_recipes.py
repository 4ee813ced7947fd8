"""Every command of docs/recipes runs, in the order of its page, with a small random model of the same family."""

import json
import re
import shlex
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from realhf import cli
from tests.docs.blocks import ROOT, Document
from tests.docs.tiny_models import write_tiny_model
from tests.unit.data.tokenizers_of_families import write_llama3, write_qwen

PAGES = sorted((ROOT / "docs/recipes").glob("*.md"))
FIRST_PAGE_QUICKLY = [
    pytest.param(path, id=path.stem, marks=[] if path.stem == "one_gpu" else pytest.mark.slow) for path in PAGES
]
SMALL = "--steps 1 --batch-size 8 --mini-batches 1 --num-workers 1 --nodes 1 --hardware cpu"
LAUNCHER = "--launcher tests.e2e.forked:ForkedLauncher --network-interface lo"
# The shapes of the models that the pages plan for, as their config.json has them.
SHAPES: dict[str, dict[str, object]] = {
    "Qwen2.5-1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "vocab_size": 151936}
    | {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "Qwen2.5-7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064}
    | {"num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False},
    "Llama-3.1-70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False},
}


def write_files(folder: Path) -> None:
    """The files that the pages name."""
    [reward] = Document(ROOT / "docs/recipes/one_gpu.md").blocks("python")
    (folder / "rewards.py").write_text(reward)
    asked = [(f"What is {i} + {7 * i}?", str(8 * i)) for i in range(128)]
    files = {
        "train": [{"prompt": question, "answer": answer} for question, answer in asked],
        "test": [{"prompt": question, "answer": answer} for question, answer in asked],
        "pairs": [{"prompt": question, "chosen": answer, "rejected": "I do not know."} for question, answer in asked],
        "chats": [
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            for question, answer in asked
        ],
    }
    files["held_out_pairs"] = files["pairs"][:8]
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def model_of(page: Document) -> str:
    [name] = set(re.findall(r"--model \./(\S+)", page.text))
    return name


def run_small(command: str) -> None:
    """A command of a page in this process, made small: a run has one worker and one step on this machine's CPU."""
    words = shlex.split(command)[1:]
    small = SMALL.split()
    if words[0] == "plan":
        small = ["--evaluations", "100"]
    elif words[0] != "run":
        small = []
    elif "--resume" in words:
        words = [word for word in words if word not in ("--launcher", "slurm")]
        small = [*LAUNCHER.split(), "--steps", "2"]
    else:
        for option in ("--launcher", "--min-workers", "--gpus-per-node", "--network-interface", "--hardware"):
            if option in words:
                place = words.index(option)
                del words[place : place + 2]
        small = [word for word in (*small, *LAUNCHER.split()) if word not in ("--hardware", "cpu")]
    for prefix in ("grpo", "ppo"):
        if f"--{prefix}.max-new-tokens" in words and words[0] == "run":
            small += [f"--{prefix}.max-new-tokens", "8"]
    assert cli.main([*words, *small]) == 0, command


@pytest.mark.distributed
@pytest.mark.parametrize("path", FIRST_PAGE_QUICKLY)
def test_the_commands_of_a_recipe(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Document(path)
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    write_tiny_model(tmp_path / model_of(page))
    for command in page.commands:
        run_small(command)
    if path.stem == "one_gpu":  # the same files are those of the first page
        readme = Document(ROOT / "README.md").commands
        [command] = (command for command in readme if command.startswith("realhf run grpo --model ./"))
        run_small(f"{command} --grpo.max-new-tokens 8 --run-dir runs/first")
    assert (tmp_path / "exported").is_dir()
    AutoModelForCausalLM.from_pretrained("exported")
    AutoTokenizer.from_pretrained("exported")
    lines = [json.loads(line) for line in Path("runs").glob("*po/metrics.jsonl").__next__().open()]
    assert [line["step"] for line in lines] == [1, 2]


def test_the_jobs_of_the_large_recipe_would_be_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Document(ROOT / "docs/recipes/slurm.md")
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    name = model_of(page)
    write_tiny_model(tmp_path / name)
    runs = [c for c in page.commands if c.startswith("realhf run") and "--resume" not in c]
    assert len(runs) == 2
    for command in runs:
        words = shlex.split(command.replace("--model runs/sft", f"--model ./{name}"))[1:]
        assert cli.main([*words, "--evaluations", "1000", "--dry-run"]) == 0
        printed = capsys.readouterr().out
        assert "#SBATCH --nodes=16" in printed
    assert not (tmp_path / "runs").exists()


def write_shape(folder: Path) -> None:
    """A directory with the config.json of a large model, and a tokenizer of its family; no weights."""
    is_qwen = folder.name.startswith("Qwen")
    (write_qwen if is_qwen else write_llama3)(folder)
    config = {"model_type": "qwen2" if is_qwen else "llama", "hidden_act": "silu", "rms_norm_eps": 1e-6}
    config |= {"max_position_embeddings": 131072, "rope_theta": 1e6, **SHAPES[folder.name]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("path", FIRST_PAGE_QUICKLY)
def test_the_figures_of_a_recipe(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The memory and the step that a page shows are what its command prints for a model of the real shape."""
    page = Document(path)
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    write_shape(tmp_path / model_of(page))
    [command] = (command for command in page.commands if command.startswith("realhf plan"))
    assert cli.main(shlex.split(command)[1:]) == 0
    printed, shown = figures(capsys.readouterr().out), figures(page.text)
    assert shown == pytest.approx(printed, rel=0.1), "the planner predicts other figures: run the command, and edit"


def figures(text: str) -> list[float]:
    """Seconds of a step, and GiB at most and from step to step."""
    [step] = re.findall(r"^predicted step: ([\d.]+) s", text, re.MULTILINE)
    [memory] = re.findall(r"^memory: at most ([\d.]+) .* device, ([\d.]+) GiB", text, re.MULTILINE)
    return [float(number) for number in (step, *memory)]
