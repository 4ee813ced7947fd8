"""Exit codes of the command line, and what it does not import."""

import subprocess
import sys
from importlib.metadata import version

import pytest

from realhf import cli
from realhf.base.errors import RunError, UserError
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize(
    ("raised", "code", "text"),
    [
        (UserError("x=3 is odd; give an even one"), 2, "error: x=3 is odd; give an even one\n"),
        (RunError("worker 1 failed"), 1, "error: worker 1 failed\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_exit_codes(
    raised: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from realhf.cli import run

    def execute(_: object) -> int:
        raise raised

    monkeypatch.setattr(run, "execute", execute)
    assert cli.main(["run", "experiment.py"]) == code
    assert capsys.readouterr().err == text


def test_fields_of_an_experiment_are_refused_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", "somewhere", "--steps", "3"])
    assert ended.value.code == 2
    assert "unknown arguments: --steps 3" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "plan", "replan", "report", "status"])
def test_the_command_line_does_not_import_torch(command: str) -> None:
    program = f"import sys, realhf.cli; realhf.cli.parser({command!r}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)


def test_help_shows_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in cli.COMMANDS)
    assert [text.index(f"\n{group}:\n") for group in cli.GROUPS] == sorted(
        text.index(f"\n{group}:\n") for group in cli.GROUPS
    )
    assert cli.main([]) == 2
    assert capsys.readouterr().err == text


def test_a_word_that_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rnu", "grpo"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: 'rnu' is no command of realhf; choose from run, evaluate, status, ")
    assert text.endswith("; did you mean run?\n")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"realhf {version('realhf')}\n"


@pytest.mark.parametrize("command", ["run", "plan", "profile"])
def test_the_beginning_of_an_option_is_a_field_s_name(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "experiments/sft.py", "--num", "3"])  # not --num-workers
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "Unrecognized options: --num, 3" in said
    assert said.endswith("the fields: realhf run experiments/sft.py --help-all\n")
