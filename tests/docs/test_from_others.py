"""docs/from_trl.md and docs/from_verl.md: their commands run on files as those libraries write them, and every row of
their tables names settings that are there, with the defaults that it states."""

import dataclasses
import enum
import inspect
import json
import re
import shlex
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset

from realhf import cli
from realhf.api.fields import flags_of
from realhf.base.options import options_in
from realhf.cli.help import experiment_fields, help_of
from realhf.data.look import main as look
from realhf.experiments import ready_file
from realhf.lifecycle.other_names import OTHER_NAMES, answer_to, parts_of
from realhf.planning.request import DevicesRequest, PlanRequest
from realhf.rundir.run import RunSpec, load_experiment_class
from tests.docs.blocks import ROOT, Document
from tests.docs.tiny_models import write_tiny_model

TRL, VERL = Document(ROOT / "docs/from_trl.md"), Document(ROOT / "docs/from_verl.md")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what is experimental
    from trl.experimental.ppo import PPOConfig

CLASSES = {
    "PPOConfig": PPOConfig,
    "GRPOConfig": trl.GRPOConfig, "RLOOConfig": trl.RLOOConfig, "SFTConfig": trl.SFTConfig, "DPOConfig": trl.DPOConfig,
}  # fmt: skip
SECTIONS = "data|model|actor|rollout|critic|algorithm|trainer|custom_reward_function|reward_model"
VERL_KEY = re.compile(rf"({SECTIONS})(\.\w+)+")
QUICKLY = ("realhf run sft ", "realhf run grpo --model ", "python -m ")  # the others run with the slow tests
SMALL = "--steps 1 --num-workers 1 --launcher tests.e2e.forked:ForkedLauncher --network-interface lo"


# --- the tables


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table below a heading that names a class (of TRL) and a command."""

    theirs: str
    their_default: str
    flags: tuple[str, ...]
    default: str
    experiment: str
    of_class: str


def rows(page: Document) -> list[Row]:
    """The rows of the tables of five columns, with the class and the command that the text before them names."""
    found, experiment, of_class = [], "", ""
    for line in page.text.splitlines():
        for command in re.findall(r"`realhf run (\w+)`", line) if not line.startswith("|") else ():
            experiment = command
        for name in re.findall(r"`(\w+Config)`", line) if not line.startswith("|") else ():
            of_class = name
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 5 and cells[2].startswith("`--"):
            flags = tuple(re.findall(r"`(--[\w.-]+)", cells[2]))
            found.append(Row(cells[0].strip("`"), cells[1], flags, cells[3], experiment, of_class))
    return found


def is_stated(stated: str, value: Any) -> bool:
    """Whether a cell states the value."""
    if isinstance(value, list | tuple) and len(value) == 1:
        [value] = value
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or value in ("", ()):
        return stated == "none"
    if isinstance(value, bool):
        return stated == ("on" if value else "off")
    return float(stated) == value if isinstance(value, int | float) else stated == value


@cache
def our_defaults(experiment: str) -> dict[str, Any]:
    cls = load_experiment_class(str(ready_file(experiment)))
    requests = [one for of in (RunSpec, PlanRequest, DevicesRequest) for one in options_in(of).values()]
    return {one.flag.replace("[no-]", ""): one.default for one in [*experiment_fields(cls), *requests]}


@cache
def our_options(experiment: str) -> set[str]:
    words = re.findall(r"--[\w.\[\]-]+", help_of("run", [str(ready_file(experiment)), "--help-all"]))
    return {word.replace("[no-]", "") for word in words}


@pytest.mark.parametrize("page", [TRL, VERL], ids=lambda page: page.path.stem)
def test_our_side_of_the_tables(page: Document) -> None:
    wrong = []
    for row in rows(page):
        assert set(row.flags) <= our_options(row.experiment), row
        default = our_defaults(row.experiment).get(row.flags[0], inspect.Parameter.empty)
        unsaid = default in (inspect.Parameter.empty, None, (), "", False)
        if not (is_stated(row.default, default) if row.default else unsaid):
            wrong.append((row.flags[0], row.experiment, row.default, default))
    assert not wrong, "an option, its experiment, the page's default and the real one"


@cache
def trl_config(name: str, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CLASSES[name](output_dir="unused", use_cpu=True, bf16=False, **options)


def test_trl_s_side_of_the_tables() -> None:
    wrong = []
    for row in rows(TRL):
        config = trl_config(row.of_class)
        if row.theirs and not hasattr(config, row.theirs):
            wrong.append((row.of_class, row.theirs, "is not there"))
        elif row.their_default and not is_stated(row.their_default, getattr(config, row.theirs)):
            wrong.append((row.of_class, row.theirs, getattr(config, row.theirs)))
    assert not wrong, "a class, its setting, and the real default"


@pytest.mark.parametrize("page", [TRL, VERL], ids=lambda page: page.path.stem)
def test_a_name_that_is_typed_is_answered_as_the_page_says(page: Document) -> None:
    known = [row for row in rows(page) if not OTHER_NAMES.keys().isdisjoint(parts_of(row.theirs))]
    assert len(known) > 25
    for row in known:
        flags = flags_of(load_experiment_class(str(ready_file(row.experiment))))
        assert row.flags[0] in re.findall(r"--[\w.-]+", answer_to(row.theirs, flags)), row


def test_the_rows_are_all_read() -> None:
    assert [len(rows(page)) for page in (TRL, VERL)] == [
        sum(line.startswith("| ") and "| `--" in line for line in page.text.splitlines()) - missing
        for page, missing in ((TRL, 0), (VERL, 1))  # the heading of a table of verl's names an option
    ]
    assert len(rows(TRL)) > 60 < len(rows(VERL)) + 10
    assert all(VERL_KEY.fullmatch(row.theirs) for row in rows(VERL))


def test_batches_and_steps_of_trl() -> None:
    """The sizes that the page derives, by TRL's own."""
    config = trl_config("GRPOConfig", per_device_train_batch_size=8, gradient_accumulation_steps=4)
    assert config.generation_batch_size == 8 * 4
    assert config.steps_per_generation == 4
    [command] = (command for command in TRL.commands if command.startswith("realhf run grpo "))
    assert "--batch-size 32 --mini-batches 1 " in command
    config = trl_config("GRPOConfig", per_device_train_batch_size=8, steps_per_generation=4)
    assert (config.generation_batch_size, config.steps_per_generation, config.gradient_accumulation_steps) == (32, 4, 1)


# --- the commands


def write_trl_files(folder: Path) -> None:
    """Data sets as `datasets` saves them for TRL's trainers."""
    asked = [(f"What is {i} + {i}?", str(2 * i)) for i in range(40)]
    user = [[{"role": "user", "content": question}] for question, _ in asked]
    assistant = [[{"role": "assistant", "content": answer}] for _, answer in asked]
    wrong = [[{"role": "assistant", "content": "I do not know."}]] * len(asked)
    prompts = {"prompt": user, "answer": [answer for _, answer in asked]}
    Dataset.from_dict(prompts).to_json(folder / "train.jsonl")
    for name, count in (("test", 8), ("hard", 5)):
        Dataset.from_dict(prompts).select(range(count)).to_json(folder / f"{name}.jsonl")
    chats = [one + other for one, other in zip(user, assistant, strict=True)]
    Dataset.from_dict({"messages": chats}).to_json(folder / "chats.jsonl")
    Dataset.from_dict({"prompt": user, "chosen": assistant, "rejected": wrong}).save_to_disk(folder / "pairs")


def write_verl_files(folder: Path) -> None:
    """As verl's `examples/data_preprocess/gsm8k.py` makes them."""
    (folder / "gsm8k").mkdir()
    for split in ("train", "test"):
        made = [
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"What is {i} + {i}?"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
                "extra_info": {"split": split, "index": i, "answer": f"#### {2 * i}"},
            }
            for i in range(40)
        ]
        Dataset.from_list(made).to_parquet(folder / "gsm8k" / f"{split}.parquet")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A user's folder for each page, with a tiny model under the name on the page."""
    made = {}
    for page, write in ((TRL, write_trl_files), (VERL, write_verl_files)):
        folder = made[page.name] = tmp_path_factory.mktemp(page.path.stem)
        write(folder)
        write_tiny_model(folder / "Qwen2.5-0.5B")
        for block in page.blocks("python"):
            first, _, code = block.partition("\n")
            (folder / first.removeprefix("# file: ")).write_text(code)
    return made


def small(words: list[str]) -> list[str]:
    """A run of one step on four prompts, whose answers are short."""
    defaults = our_defaults(words[1])
    responses = [value for flag, value in defaults.items() if flag.endswith("samples-per-prompt")]
    given = [words[i + 1] for i, word in enumerate(words) if word.endswith("samples-per-prompt")]
    batch_size = 4 * int([1, *responses, *given][-1])
    lengths = [word for flag in defaults if flag.endswith("max-new-tokens") for word in (flag, "8")]
    evaluation = ["--eval-batch-size", "8"] if "--eval-data" in words else []
    return [*SMALL.split(), "--batch-size", str(batch_size), "--mini-batches", "1", *lengths, *evaluation]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("page", "command"),
    [
        pytest.param(page, command, id=command[:40], marks=[] if command.startswith(QUICKLY) else pytest.mark.slow)
        for page in (TRL, VERL)
        for command in page.commands
    ],
)
def test_commands(
    page: Document, command: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(folders[page.name])
    words = shlex.split(command)
    if "runs/sft" in words[:-1] and "sft" not in words and not Path("runs/sft").exists():  # the page makes it first
        [first] = (one for one in page.commands if one.startswith("realhf run sft "))
        assert cli.main([*shlex.split(first)[1:], *small(shlex.split(first)[1:])]) == 0
    if words[0] == "python":
        assert look(words[3:]) == 0
        assert "What is 1 + 1?" in capsys.readouterr().out
        return
    assert cli.main([*words[1:], *small(words[1:])]) == 0
    if page is TRL and words[2] == "grpo":
        run = Path(words[words.index("--run-dir") + 1])
        [line] = [json.loads(line) for line in (run / "metrics.jsonl").open()]
        assert 0 <= line["share with digits"] <= 1
        assert line["reward_brief"] == 0, "before the first step"
        samples = [json.loads(line) for line in (run / "samples.jsonl").open()]
        assert {sample["split"] for sample in samples} == {"train", "evaluation/easy", "evaluation/hard"}
        assert all(sample["details"]["notes"]["length"] >= 0 for sample in samples)
        assert cli.main([*words[1:], *small(words[1:]), "--resume", "--steps", "2"]) == 0
        first, middle, last = (json.loads(line) for line in (run / "evaluations.jsonl").open())
        assert [line["step"] for line in (first, middle, last)] == [0, 1, 2]
        of_set = [{name.partition("/")[2] for name in first if name.startswith(f"{one}/")} for one in ("easy", "hard")]
        assert of_set[0] == of_set[1] > {"reward_brief", "reward_accuracy"}
        assert first.keys() == middle.keys() == last.keys()
        assert last["easy/reward_brief"] < 0, "after the last step the weight is 1"
