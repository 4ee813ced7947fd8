"""Numbers of `realhf run` that no run can have are refused before anything is done with them."""

import re
from pathlib import Path

import pytest

from realhf import cli

HUGE = str(10**18)
BAD = {
    "--num-workers": ("0", "-1", "1000000000"),
    "--nodes": ("0", "-3", HUGE),
    "--gpus-per-node": ("0", HUGE),
    "--memory-gb": ("0", "-1", "1e30", "inf", "nan"),
    "--steps": ("0", "-1", HUGE),
    "--seed": ("-1", str(2**64)),
    "--checkpoint-every": ("0", "-1", HUGE),
    "--checkpoint-every-minutes": ("0", "-1", "1e30", "inf", "nan"),
    "--keep-checkpoints": ("0", HUGE),
    "--stop-early-patience": ("0", HUGE),
    "--stop-early-gain": ("-1", "1e30", "inf", "nan"),
    "--checkpoint-failures": ("-1", HUGE),
    "--samples": ("-1", HUGE),
    "--staleness-up-to": ("-1", HUGE),
    "--verify-reallocations-every": ("-1", HUGE),
    "--call-timeout-s": ("0", "-1", "1e30", "inf", "nan"),
    "--setup-timeout-s": ("0", "-1", "1e30", "inf", "nan"),
    "--master-timeout-s": ("0", "-1", "1e30", "inf", "nan"),
    "--deadline-factor": ("0.5", "1e30", "inf", "nan"),
    "--drift-threshold": ("1", "0", "-2", "1e30", "inf", "nan"),
    "--max-restarts": ("0", HUGE),
    "--min-workers": ("0", HUGE),
    "--switch-cost-s": ("-1", "1e30", "inf", "nan"),
    "--cpus-per-worker": ("0", "-1", HUGE),
    "--at-most": ("0", "-1", HUGE),
    "--notice-s": ("0", "1e30", "inf", "nan"),
    "--queue-timeout-s": ("-1", "1e30", "inf", "nan"),
}
FIELDS = {"--steps", "--seed"}  # of the experiment


@pytest.mark.parametrize(("option", "value"), [(option, value) for option, values in BAD.items() for value in values])
def test_it_is_refused_by_name_and_nothing_is_left(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    assert cli.main(["run", "experiments/ppo.py", f"{option}={value}", "--run-dir", str(run_dir)]) == 2
    printed = capsys.readouterr()
    rule = r"is not from \S+ to \S+( [A-Za-z ]+)?; give a number in that range"
    assert re.fullmatch(rf"error: {option} \S+ {rule}\n", printed.err)
    assert printed.out == ""
    assert not run_dir.exists()


def test_every_number_of_the_command_line_is_tried() -> None:
    numbers = {
        action.option_strings[0]
        for action in _actions()
        if action.type in (int, float) and action.dest not in ("evaluations", "seconds")  # of the search of a plan
    }
    assert numbers | FIELDS == set(BAD)


def test_a_wrong_word_for_sbatch_leaves_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    words = ["run", "experiments/ppo.py", "--plan", "tests/plans/single.json", "--run-dir", str(run_dir)]
    assert cli.main([*words, "--launcher", "slurm", "--cpu-only", "--sbatch", "qos"]) == 2
    assert "'qos' is no sbatch option; write one as --name=value" in capsys.readouterr().err
    assert not run_dir.exists()


def _actions():  # type: ignore[no-untyped-def]
    return cli.parser("run")._actions


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("--actor-lr", "nan", "--actor-lr nan is not finite"),
        ("--reference-eta", "inf", "--reference-eta inf is not finite"),
        ("--actor-lr", "-1", "optimizer: lr -1.0 is not from 1e-20 to "),
        ("--ppo.kl-coef", "nan", "--ppo.kl-coef nan is not from 0 to "),
        ("--ppo.reward-std", "inf", "--ppo.reward-std inf is not from "),
        ("--ppo.temperature", "1e-320", "--ppo.temperature 1e-320 is not from 1e-06 to 1,000,000 or 0 (the "),
    ],
)
def test_a_number_of_the_experiment_that_computes_nan_is_refused(
    field: str, value: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "experiments/ppo.py", "--plan", "tests/plans/single.json", f"{field}={value}"]
    assert cli.main([*words, "--run-dir", str(tmp_path / "run")]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
