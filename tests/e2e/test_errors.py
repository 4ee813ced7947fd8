"""A mistake of the user ends the command with code 2 and one paragraph that says what to do; nothing was started."""

import json
import re
import shutil
from pathlib import Path

import psutil
import pytest

from realhf.machine.gpus import visible_gpus
from tests.e2e.runs import ROOT, realhf, realhf_here

PLAN = ROOT / "tests/plans/single.json"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory of its own, which tests copy before they break it."""
    # Made by the first command that needs it, as for a user.
    folder = tmp_path_factory.mktemp("data") / "sort"
    words = ("--data-dir", folder, "--num-workers", "1", "--evaluations", "100")
    assert realhf_here("plan", "experiments/ppo.py", *words).returncode == 0
    assert (folder / "prompts.jsonl").is_file()
    return folder


@pytest.fixture
def broken(data: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(data, tmp_path / "data"))


def refused(run_dir: Path, experiment: str | Path, *words: str | Path) -> str:
    """The one paragraph with which `realhf run` refuses; checks that it leaves nothing behind."""
    done = realhf_here("run", experiment, "--run-dir", run_dir, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert not run_dir.exists()
    assert not [p.pid for p in psutil.process_iter(["cmdline"]) if str(run_dir) in " ".join(p.info["cmdline"] or ())]
    return done.stderr


def error(run_dir: Path, experiment: str | Path, *words: str | Path) -> str:
    """As `refused`; the text behind `error: `, of one line, before which there may be those of a search's phases."""
    text = refused(run_dir, experiment, *words)
    match = re.fullmatch(r"(?:[^\n]+ \([\d.]+ m?s\)\n)*error: ([^\n]+\n)", text)
    assert match, text
    return match[1]


def test_a_broken_line_of_the_data_set(broken: Path, tmp_path: Path) -> None:
    path = broken / "prompts.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[4] = lines[4].rstrip("}\n") + "\n"
    path.write_text("".join(lines))
    text = error(tmp_path / "run", "experiments/ppo.py", "--data-dir", broken, "--plan", PLAN)
    assert text.startswith(f"{path}, line 5: broken JSON")
    assert text.endswith("correct the line or delete it\n")


def test_a_line_that_lacks_a_field(broken: Path, tmp_path: Path) -> None:
    path = broken / "prompts.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[2] = json.dumps({"promt": "3 1 2"}) + "\n"
    path.write_text("".join(lines))
    text = error(tmp_path / "run", "experiments/ppo.py", "--data-dir", broken, "--plan", PLAN)
    assert text.startswith(f"{path}, line 3: field 'prompt' is missing")
    assert text.endswith("add it or delete the line\n")


def test_a_broken_line_of_the_evaluation(broken: Path, tmp_path: Path) -> None:
    path = broken / "evaluation.jsonl"
    path.write_text(path.read_text() + "{\n")
    text = error(tmp_path / "run", "experiments/ppo.py", "--data-dir", broken, "--plan", PLAN)
    assert text.startswith(f"{path}, line {len(path.read_text().splitlines())}: ")


def test_a_data_file_that_is_missing(broken: Path, tmp_path: Path) -> None:
    (broken / "tokenizer.json").write_text("no tokenizer")
    text = error(tmp_path / "run", "experiments/ppo.py", "--data-dir", broken, "--plan", PLAN)
    assert str(broken / "tokenizer.json") in text


def test_an_experiment_file_that_is_missing(tmp_path: Path) -> None:
    text = error(tmp_path / "run", "experiments/pop.py")
    assert text == "experiments/pop.py: no such file; give the path of an experiment, such as experiments/ppo.py\n"


def test_a_syntax_error_in_an_experiment_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text('"""Mine."""\n\nclass Mine\n    seed: int = 0\n')
    assert error(tmp_path / "run", path).startswith(f"{path}:3: cannot be imported: SyntaxError: expected ':'")


def test_an_unknown_field(tmp_path: Path) -> None:
    text = refused(tmp_path / "run", "experiments/ppo.py", "--ppo.kl-coeff", "1")
    assert "--ppo.kl-coeff" in text
    assert "--ppo.kl-coef " in text, "the one that was meant"


def test_a_field_of_a_wrong_type(tmp_path: Path) -> None:
    text = refused(tmp_path / "run", "experiments/ppo.py", "--steps", "many")
    assert "--steps" in text
    assert "'many'" in text


def changed_plan(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(PLAN.read_text()) | changes))
    return path


def test_a_plan_for_other_calls(tmp_path: Path) -> None:
    text = error(tmp_path / "run", "experiments/sft.py", "--plan", PLAN)
    assert text.startswith("the plan is for other calls: it has actor_generate, ")
    assert text.endswith("the experiment has sft_train_step; make a plan for this experiment with `realhf plan`\n")


def test_a_plan_for_another_model(tmp_path: Path) -> None:
    config = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "vocab_size": 8,
    }
    text = error(tmp_path / "run", "experiments/ppo.py", "--plan", changed_plan(tmp_path, models={"actor": config}))
    assert text.startswith("the plan is for another model: its 'actor' is DecoderConfig(hidden_size=64, ")


def test_a_plan_file_with_an_unknown_key(tmp_path: Path) -> None:
    path = changed_plan(tmp_path, num_device=1)
    text = error(tmp_path / "run", "experiments/ppo.py", "--plan", path)
    assert text.startswith(f"{path}: not a plan: Object contains unknown field `num_device`")


def test_a_plan_file_that_is_missing(tmp_path: Path) -> None:
    text = error(tmp_path / "run", "experiments/ppo.py", "--plan", "nowhere.json")
    assert text.startswith("nowhere.json: cannot read the plan (No such file or directory)")


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    text = error(tmp_path / "run", "experiments/ppo.py", "--model", "nowhere", "--plan", PLAN)
    assert text.startswith("model 'nowhere': no such directory; give a Hugging Face directory")


def test_a_dp_that_does_not_divide_the_batch(tmp_path: Path) -> None:
    words = ("--plan", "tests/plans/dp4.json", "--batch-size", "20", "--mini-batches", "2")
    text = error(tmp_path / "run", "experiments/ppo.py", *words)
    assert re.search(r"dp=4 x micro_batches=\d+ does not divide the mini-batch of \d+ samples; choose a product", text)


@pytest.mark.skipif(visible_gpus(), reason="megatron-core may run here")
def test_a_backend_for_gpus_without_one(tmp_path: Path) -> None:
    text = error(tmp_path / "run", "experiments/ppo.py", "--plan", PLAN, "--backend", "megatron")
    assert text == ("--backend='megatron' needs a GPU, and the model is on cpu; run it on one, or choose native\n")


def test_a_cache_without_room_for_one_sequence(tmp_path: Path) -> None:
    text = error(tmp_path / "run", "experiments/ppo.py", "--plan", PLAN, "--ppo.kv-cache-tokens", "8")
    assert re.fullmatch(
        r"actor_generate: --ppo.kv-cache-tokens=8 is not room for one sequence of \d+ tokens, in pages of 16, in "
        r"each of pp=1 parts of the batch; set it to at least 32, or leave it out\n",
        text,
    )


def test_a_batch_larger_than_the_data_set(tmp_path: Path) -> None:
    text = error(tmp_path / "run", "experiments/ppo.py", "--plan", PLAN, "--batch-size", "1048576")
    assert re.search(r"the data set .* has \d+ rows, fewer than --batch-size=1048576", text)


def test_a_run_directory_with_something_in_it(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = realhf("run", "experiments/ppo.py", "--plan", PLAN, "--run-dir", tmp_path)
    assert done.returncode == 2
    assert (
        done.stderr == f"error: the run directory {tmp_path} exists and is not empty; give a new one with --run-dir\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


TWO_PRODUCERS = """
from dataclasses import dataclass

from experiments.ppo import PPOExperiment
from realhf.api import INFERENCE, ModelFunctionCallDef, Score, auto


@auto(batch_size=128)
@dataclass(frozen=True, kw_only=True)
class TwoJudges(PPOExperiment):
    @property
    def rpcs(self):
        second = ModelFunctionCallDef(
            model_name="judge",
            model_type=self.architecture.with_head("scalar"),
            interface_type=INFERENCE,
            interface_impl=Score(),
            input_data=["seq"],
            output_data=["reward"],
        )
        return [*super().rpcs, second]
"""


def test_a_key_with_two_producers(tmp_path: Path) -> None:
    path = tmp_path / "judges.py"
    path.write_text(TWO_PRODUCERS)
    text = error(tmp_path / "run", path)
    assert text == "key 'reward' has two producers, reward_inference and judge_inference; rename one of the outputs\n"


def test_words_that_no_command_knows(tmp_path: Path) -> None:
    done = realhf("runn", "experiments/ppo.py")
    assert done.returncode == 2
    assert "did you mean run?" in done.stderr
    assert "Traceback" not in done.stderr


ABSENT_INTERFACE = """
from dataclasses import dataclass, replace
from typing import ClassVar

from experiments.sft import SFTExperiment
from realhf.api import Update, auto


class Absent(Update):
    implementation: ClassVar[str] = "absent_interface:Absent"


@auto(batch_size=128)
@dataclass(frozen=True, kw_only=True)
class Mine(SFTExperiment):
    @property
    def rpcs(self):
        return [replace(call, interface_impl=Absent(**vars(call.interface_impl))) for call in super().rpcs]
"""


def test_an_interface_whose_module_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(ABSENT_INTERFACE)
    text = error(tmp_path / "run", path, "--num-workers", "1", "--evaluations", "100")
    assert text == (
        "sft_train_step: Absent is implemented in a module 'absent_interface', which is not there; put the file "
        "absent_interface.py beside the experiment's, or install the package\n"
    )
