"""The command lines of a chain's stages and of a sweep's runs."""

import pytest

from realhf.base.errors import UserError
from realhf.launch.launcher import NoOptions
from realhf.launch.slurm.script import SlurmOptions
from realhf.lifecycle.stages import SweepOptions, chain, members


def split(line: str) -> list[str]:
    return [" ".join(words) for words in chain([part.split() for part in line.split("--then")], SlurmOptions)]


def test_a_stage_has_its_own_words_and_where_the_first_one_runs() -> None:
    line = (
        "run sft.py --steps 4 --launcher slurm --nodes=2 --gpus-per-node 8 --cpu-only --run-dir runs/a --detach "
        "--then reward.py --lr 1 --nodes 1 --run-dir runs/b --then ppo.py --reward-model runs/b"
    )
    assert split(line) == [
        "run sft.py --steps 4 --launcher slurm --nodes=2 --gpus-per-node 8 --cpu-only --run-dir runs/a",
        "run reward.py --lr 1 --nodes 1 --run-dir runs/b --launcher slurm --gpus-per-node 8 --cpu-only",
        "run ppo.py --reward-model runs/b --launcher slurm --nodes=2 --gpus-per-node 8 --cpu-only",
    ]


def test_an_option_that_may_be_repeated_is_given_anew_as_a_whole() -> None:
    assert split("run a.py --setup-line x --setup-line y --then b.py --then c.py --setup-line=z")[1:] == [
        "run b.py --setup-line x --setup-line y",
        "run c.py --setup-line=z",
    ]


def test_what_says_how_a_run_saves_or_trains_stays_with_its_stage() -> None:
    assert split("run a.py --checkpoint-every 5 --batch-size 8 --plan p.json --then b.py")[1] == "run b.py"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run a.py --then", "--then names no experiment"),
        ("run a.py --then --then b.py", "--then names no experiment"),
        ("run a.py --then b.py --detach", "--detach behind --then: .*; give it before the first --then"),
        ("run a.py --then b.py --seeds=3", "--seeds behind --then: .*; leave it out, or --then"),
        ("run a.py --then b.py --resume", "--resume behind --then"),
    ],
)
def test_words_that_are_no_stage(line: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        chain([part.split() for part in line.split("--then")], NoOptions)


def test_a_sweep_has_a_run_for_each_combination() -> None:
    line = "run ppo.py --seeds 2 --sweep ppo.kl-coef=0.01,0.1 --run-dir runs/x --steps 3 --at-most 2 --detach"
    words = line.split()
    sweep = SweepOptions(seeds="2", sweep=("ppo.kl-coef=0.01,0.1",), at_most=2)
    assert {name: " ".join(line) for name, line in members(words, sweep).items()} == {
        "ppo.kl-coef-0.01_seed-0": "run ppo.py --steps 3 --ppo.kl-coef 0.01 --seed 0",
        "ppo.kl-coef-0.01_seed-1": "run ppo.py --steps 3 --ppo.kl-coef 0.01 --seed 1",
        "ppo.kl-coef-0.1_seed-0": "run ppo.py --steps 3 --ppo.kl-coef 0.1 --seed 0",
        "ppo.kl-coef-0.1_seed-1": "run ppo.py --steps 3 --ppo.kl-coef 0.1 --seed 1",
    }


def test_the_name_of_a_run_is_one_of_a_directory() -> None:
    sweep = SweepOptions(sweep=("model=runs/a,../b c",))
    assert [*members(["run", "a.py"], sweep)] == ["model-runs-a", "model-..-b-c"]
    with pytest.raises(UserError, match="no names of their own: model-runs-a"):
        members(["run", "a.py"], SweepOptions(sweep=("model=runs/a,runs:a",)))


@pytest.mark.parametrize(("text", "seeds"), [("3", ("0", "1", "2")), ("1,5,7", ("1", "5", "7")), ("7,", ("7",))])
def test_seeds_are_a_number_or_a_list(text: str, seeds: tuple[str, ...]) -> None:
    assert SweepOptions(seeds=text).fields == {"seed": seeds}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": "few"}, "--seeds few: give how many"),
        ({"seeds": "0"}, "--seeds 0 is not from 1 to 1000"),
        ({"seeds": "1,1"}, "--seeds 1,1 has a value twice"),
        ({"sweep": ("lr",)}, "--sweep lr: give a field and its values"),
        ({"sweep": ("lr=1,",)}, "--sweep lr=1,: give a field and its values"),
        ({"sweep": ("lr=1,2", "lr=3")}, "--sweep names lr twice"),
        ({"sweep": ("seed=1,2",), "seeds": "2"}, "are the same; give one"),
        ({"sweep": ("a=" + ",".join(map(str, range(40))),), "seeds": "40"}, "ask for 1600 runs, more than 1000"),
        ({"at_most": 2}, "--at-most 2 is for a sweep"),
        ({"seeds": "2", "at_most": 0}, "--at-most"),
    ],
)
def test_wrong_sweeps_are_told(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        SweepOptions(**options)
