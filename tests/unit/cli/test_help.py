"""The help: short, with a sentence for every option, none twice; and what an old option is answered."""

import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
import tyro

from realhf import cli
from realhf.api.experiment import OptimizerConfig
from realhf.api.fields import experiment_fields
from realhf.base.options import flags
from realhf.cli.command import HELP
from realhf.cli.help import help_of
from realhf.experiments import ready_experiments
from realhf.launch.slurm.script import SlurmOptions
from realhf.rundir.run import load_experiment_class

READY = {one.name: str(one.path) for one in ready_experiments()}
COMMANDS = [[name] for name in cli.COMMANDS] + [["run", name] for name in READY]
PPO = "experiments/ppo.py"

# The options of `realhf` in README.md at the first version that this holds for, by command.
OLD_OPTIONS = {
    "run": "--model --data --reward --list --steps --ppo.kl-coef --run-dir --num-workers --resume --recover "
    "--memory-gb --launcher --nodes --gpus-per-node --hardware --dry-run --then --seeds --sweep --tensorboard --wandb",
    "plan": "--num-workers --osdp",
    "profile": "--only --launcher",
    "doctor": "--gpu",
}


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def shown(*words: str) -> str:
    return help_of(words[0], words[1:])


def options(text: str) -> list[str]:
    """The options that a help lists."""
    return re.findall(r"^  (--?[\w\[\].-]+)", text, re.MULTILINE)


def test_the_help_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert len(capsys.readouterr().out.splitlines()) <= 50
    assert len(shown("run", "--help").splitlines()) <= 50
    for name in READY:
        assert len(shown("run", name, "--help").splitlines()) <= 100, name


def test_the_help_of_a_run_has_what_most_runs_need() -> None:
    few, all_of_them = options(shown("run", "--help")), options(shown("run", "--help-all"))
    assert 18 <= len(few) <= 24
    assert {*few} < {*all_of_them}
    known = {one.option_strings[0] for one in cli.parser("run")._actions if one.option_strings}
    assert {*all_of_them} == known - {*flags(SlurmOptions)}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_option_has_a_sentence_and_is_there_once(words: list[str]) -> None:
    text = shown(*words, "--help-all", *(["--launcher", "slurm"] if words[0] in ("run", "profile") else []))
    assert [name for name, count in Counter(options(text)).items() if count > 1] == []
    without = re.findall(r"^  (--?\S+(?: \S+)?)(?:, --\S+)?\n(?! {20})", text, re.MULTILINE)
    assert without == []
    assert "usage: realhf" in text


@pytest.mark.parametrize("name", READY)
def test_every_field_of_an_algorithm_has_a_sentence(name: str) -> None:
    found = list(experiment_fields(load_experiment_class(READY[name])))
    assert len(found) > 60
    assert [one.flag for one in found if not one.option.documentation] == []


@pytest.mark.parametrize("path", [*READY.values(), PPO])
def test_the_names_of_fields_are_those_that_are_read(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    cls = load_experiment_class(path)
    with pytest.raises(SystemExit):
        tyro.cli(cls, args=["--help"], config=(tyro.conf.AvoidSubcommands,))
    read = {*re.findall(r"^[ |│]+(--\w[\w.-]*)", capsys.readouterr().out, re.MULTILINE)}
    found = {one.flag.replace("[no-]", "") for one in experiment_fields(cls)}
    assert found <= read
    of_optimizer = {one.name.replace("_", "-") for one in fields(OptimizerConfig)} | {"with-optimizer"}
    assert {name.rpartition(".")[2] for name in read - found} <= of_optimizer


@pytest.mark.parametrize(
    ("command", "default"),
    [
        ("run", "default: as long as the problem needs"),
        ("search", "default 10"),
        ("replan", "default 20,000"),
    ],
)
def test_a_default_is_a_value_or_words_behind_a_colon(command: str, default: str) -> None:
    assert f"({default})" in " ".join(shown(command, "--help").split())


def test_a_model_that_never_trains_has_no_optimizer() -> None:
    text = shown("run", "grpo", "--help-all")
    assert "--actor.lr" in text
    assert "--reference.backend" in text
    assert "--reference.lr" not in text
    assert "--reference.with-optimizer" not in text


def test_a_model_from_a_checkpoint_has_no_architecture() -> None:
    assert "--architecture.hidden-size" in shown("run", "grpo", "--help-all")
    assert "--architecture" not in shown("run", "grpo", "--help")
    assert "--architecture" not in shown("run", "grpo", "--model", "somewhere", "--help-all")


def test_an_evaluation_is_no_training() -> None:
    sections = dict(re.findall(r"^(\w.*):\n((?:  .*\n)+)", shown("evaluate", "--help-all"), re.MULTILINE))
    assert {"--seed", "--batch-size", "--dtype"} <= {*options(sections["evaluation"])}
    assert "training" not in sections
    assert "training" in dict(re.findall(r"^(\w.*):\n((?:  .*\n)+)", shown("run", "grpo", "--help"), re.MULTILINE))


def test_a_launcher_shows_its_options_where_it_is_chosen(tmp_path: Path) -> None:
    assert "--partition" not in shown("run", "--help-all")
    assert "--partition" in shown("run", "--launcher", "slurm", "--help")
    assert "--partition" in shown("profile", "--launcher", "slurm", "--help")
    (tmp_path / "mine.py").write_text(Path(PPO).read_text().replace("@auto(", '@auto(launcher="slurm", ', 1))
    assert "--partition" in shown("run", str(tmp_path / "mine.py"), "--help")
    nice = Path("tests/e2e/nice_launcher.py").absolute()
    assert "--nice N" in shown("run", "--launcher", f"{nice}:NiceLauncher", "--help")


@pytest.mark.parametrize("words", [["run", *HELP[:1]], ["plan", "--help"], ["status", "--help"], ["osdp", "--help"]])
def test_the_help_is_printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    assert capsys.readouterr().out.startswith(f"usage: realhf {words[0]} ")


def test_an_experiment_of_another_name_has_no_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "gpro", "--help"]) == 2
    assert "did you mean grpo?" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "old"), cli.RENAMED)
@pytest.mark.parametrize("value", ["", "=llama7b"])
def test_an_old_option_is_answered_with_the_new_one(
    command: str, old: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, PPO, f"{old}{value}"]) == 2
    new = cli.RENAMED[command, old]
    assert capsys.readouterr().err == f"error: `realhf {command} {old}` is no more; write: {new}\n"
    assert new.split()[1] in cli.COMMANDS


@pytest.mark.parametrize(
    ("command", "option"), [(command, one) for command, line in OLD_OPTIONS.items() for one in line.split()]
)
def test_the_options_of_the_old_readme_are_there_or_are_renamed(command: str, option: str) -> None:
    fields = {one.flag for path in (READY["grpo"], PPO) for one in experiment_fields(load_experiment_class(path))}
    is_there = cli.parser(command).has(option) or (command in cli.WITH_EXPERIMENT and option in fields)
    assert is_there != ((command, option) in cli.RENAMED)
