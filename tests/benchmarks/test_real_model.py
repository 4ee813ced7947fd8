"""`benchmarks/real_model.py`: TRL is given the questions and settings of our run, and ratios are those of turns."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from transformers import AutoTokenizer

from tests.docs.tiny_models import write_tiny_model
from tests.e2e.runs import benchmark

real_model = importlib.import_module("real_model")
TRL_VERSION = "1.16.0"
STEPS = 3
TRL = f"TRL {TRL_VERSION}"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the benchmark's recipe on a tiny model."""
    folder = tmp_path_factory.mktemp("real_model")
    model, data = write_tiny_model(folder / "Qwen-tiny"), folder / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(5)))
    words = real_model.training_words(real_model.SUMS, model, data, folder / "run", steps=STEPS, seed=7)
    few = (*real_model.OURS["realhf"], "--batch-size", "16", "--actor.warmup-steps", "1")
    made = real_model.our_run((*words, *few), folder / "run")
    assert len(made.step_s) == STEPS - 1
    assert len(made.rewards) == STEPS
    assert all(seconds > 0 for seconds in made.step_s)
    return folder / "run"


@pytest.mark.distributed
def test_trl_gets_the_settings_and_questions_of_our_run(run_dir: Path) -> None:
    settings = real_model.trl_settings(run_dir)
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert settings["rates"] == pytest.approx([step["actor_lr"] for step in metrics])
    assert len(settings["rows"]) == STEPS * 2
    assert settings["config"] | {"temperature": 0.7, "adam_beta2": 0.95} == settings["config"]
    assert [settings["config"][name] for name in ("seed", "max_steps", "num_generations")] == [7, STEPS, 8]
    assert settings["config"]["per_device_train_batch_size"] * settings["config"]["gradient_accumulation_steps"] == 16
    assert settings["config"]["max_completion_length"] == 16

    sampled = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    for sample in sampled:
        row = settings["rows"][(sample["step"] - 1) * 2 + sample["sample"] // 8]
        assert row["prompt"] == sample["prompt"]
        question = f"{int(row['answer']) - 1} + 1 ="
        chat = [{"role": "user", "content": question}]
        expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert tokenizer(row["prompt"])["input_ids"] == expected


def turn(ours: list[float], theirs: list[float], reward: float) -> dict:
    names = dict.fromkeys(real_model.OURS, real_model.Run(ours, [reward, 0.5]))
    return names | {TRL: real_model.Run(theirs, [0.25, 0.25])}


def test_a_ratio_is_the_median_of_the_turns_and_a_reward_the_mean_of_the_last_steps() -> None:
    turns = [turn([1.0, 2.0, 9.0], [8.0], 0.0), turn([4.0], [8.0, 8.0], 0.5), turn([4.0], [40.0], 1.0)]
    step, reward = real_model.cases(turns, "realhf", TRL)
    assert (step["value"], step["baseline"], step["ratio"], step["holds"]) == (4.0, 8.0, 4.0, True)
    assert (reward["value"], reward["baseline"]) == (0.5, 0.25)
    step, _ = real_model.cases(turns[1:2], "realhf", TRL)
    assert (step["ratio"], step["holds"]) == (2.0, False)


def test_the_picture_has_the_rewards_of_all_sides(tmp_path: Path) -> None:
    real_model.picture([turn([1.0], [8.0], 0.0), turn([1.0], [8.0], 1.0)]).write(tmp_path / "rewards.svg")
    elements = list(ElementTree.parse(tmp_path / "rewards.svg").iter())
    assert {*real_model.OURS, TRL} <= {element.text for element in elements}
    assert sum(element.tag.endswith("polyline") for element in elements) == 3


def test_another_trl_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has TRL 1\.12\.0, and TRL 1\.16 is compared; see --help"):
        real_model.trl_version(Path(sys.executable))
    with pytest.raises(SystemExit, match=r"no-python: No such file or directory; see --help"):
        real_model.trl_version(tmp_path / "no-python")


@pytest.fixture
def trl_python(tmp_path: Path) -> Path:
    """A Python with TRL 1.16 before the installed one."""
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "trl"), f"trl=={TRL_VERSION}"]
    installed = subprocess.run([sys.executable, *install], capture_output=True, text=True, timeout=300)
    if installed.returncode:
        pytest.skip(f"pip cannot get trl {TRL_VERSION}: {installed.stderr.strip().splitlines()[-1]}")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "trl"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.slow
def test_trl_trains_as_it_is_told(run_dir: Path, trl_python: Path, tmp_path: Path) -> None:
    assert real_model.trl_version(trl_python) == TRL_VERSION
    found = real_model.trl_run(trl_python, real_model.trl_settings(run_dir), tmp_path / "settings.json")
    assert len(found.step_s) == STEPS - 1
    assert len(found.rewards) == STEPS
    assert all(0 <= reward <= 1 for reward in found.rewards)


@pytest.mark.slow
def test_the_benchmark_on_the_real_model(trl_python: Path, tmp_path: Path) -> None:
    file = tmp_path / "rewards.svg"
    found = json.loads(
        benchmark("real_model", "--quick", "--trl-python", trl_python, "--picture", file).splitlines()[-1]
    )
    assert [row["case"] for row in found["results"]] == [
        f"{name}: {what}, beside {TRL}" for name in real_model.OURS for what in ("a step", "reward")
    ]
    assert file.is_file()
