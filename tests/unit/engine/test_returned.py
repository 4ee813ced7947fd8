"""What an interface gives back: what is taken, and what is said of everything else."""

import re
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from realhf.dataflow.interface import SampleDType
from realhf.engine.interface import CallResult
from realhf.engine.returned import (
    InterfaceError,
    check_columns,
    check_end,
    check_loss,
    check_result,
    check_state,
    check_stats,
    read_losses,
)
from realhf.rewards.details import RewardDetails

IDS = (4, 9)
NAN, INF = float("nan"), float("inf")


def taken(result: Any, *, declared: tuple[str, ...] = ("reward",), recorded: tuple[str, ...] = ()) -> CallResult:
    return check_result(result, IDS, declared=declared, recorded=recorded, holds_outputs=True)


def rewards(*values: Any, **others: Any) -> CallResult:
    return CallResult(outputs={"reward": list(values), **others})


def test_a_result_that_keeps_the_rules() -> None:
    of_any_length = [torch.zeros(3, 2), torch.ones(0, 2)]
    result = taken(rewards(*of_any_length, unused=[NAN]))
    assert list(result.outputs) == ["reward"]
    assert all(map(torch.equal, result.outputs["reward"], of_any_length))
    assert (result.stats, result.details) == ({}, {})


@pytest.mark.parametrize("dtype", get_args(SampleDType))
def test_the_dtypes_that_can_be_sent(dtype: str) -> None:
    value = torch.ones(2, dtype=getattr(torch, dtype))
    assert taken(rewards(value, value)).outputs["reward"][0].dtype == value.dtype


def test_nothing_is_taken_where_outputs_are_not_held() -> None:
    result = check_result(
        CallResult(outputs={"reward": []}, stats={"a": 1.0}),  # type: ignore[dict-item]
        IDS,
        declared=("reward",),
        recorded=(),
        holds_outputs=False,
    )
    assert result == CallResult()


def test_what_is_recorded_alone_may_be_infinite_and_has_no_gradient() -> None:
    logits = [torch.tensor([[1.0, -INF]], requires_grad=True)] * 2
    result = taken(CallResult(outputs={"logits": logits}), declared=(), recorded=("logits", "margin"))
    assert not any(value.requires_grad for value in result.outputs["logits"])


ONE = torch.ones(1)
BAD_RESULTS: dict[str, tuple[Any, str]] = {
    "None": (None, "the result is None, must be a CallResult; return CallResult(...) on every path"),
    "a dict": ({"reward": [ONE, ONE]}, "the result is a dict, must be a CallResult"),
    "no dict of outputs": (CallResult(outputs=[ONE]), "the outputs are [a tensor [1] of float32], must be a dict"),  # type: ignore[arg-type]
    "another key": (
        CallResult(outputs={"rewards": [ONE, ONE]}),
        "the call declares the output 'reward', and the result has rewards; return every key of output_data",
    ),
    "one tensor": (
        CallResult(outputs={"reward": torch.ones(2, 1)}),  # type: ignore[dict-item]
        "output 'reward' is a tensor [2, 1] of float32, must be a list of one tensor [length, ...] a sample",
    ),
    "too few": (rewards(ONE), "output 'reward' has 1 tensors for 2 samples; return one a sample, in the order"),
    "a number": (rewards(ONE, 1.0), "output 'reward', sample 9, is 1.0, must be a tensor [length, ...]"),
    "a scalar": (rewards(ONE, ONE[0]), "output 'reward', sample 9, is a tensor [], must be [length, ...]; a scalar"),
    "an empty row": (rewards(torch.ones(2, 0), ONE), "sample 4, is a tensor [2, 0] of float32, must be dense, and not"),
    "sparse": (rewards(torch.eye(2).to_sparse(), ONE), "sample 4, is a sparse tensor [2, 2] of float32, must be dense"),
    "complex": (rewards(ONE, ONE.to(torch.complex64)), "sample 9, is a tensor [1] of complex64, must be of one of the"),
    "two dtypes": (
        rewards(ONE, ONE.double()),
        "output 'reward', sample 9, is a tensor [1] of float64, but sample 4 has a tensor [1] of float32; all samples",
    ),
    "two shapes": (rewards(ONE, torch.ones(1, 2)), "sample 9, is a tensor [1, 2] of float32, but sample 4 has a"),
    "NaN": (
        rewards(torch.ones(2, 2), torch.tensor([[0.0, 1.0], [2.0, NAN]])),
        "output 'reward', sample 9, has nan at [1, 1], must be finite",
    ),
    "infinite": (rewards(-ONE / 0, ONE), "output 'reward', sample 4, has -inf at [0], must be finite"),
    "no dict of statistics": (CallResult(outputs={"reward": [ONE] * 2}, stats=None), "the statistics are None"),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize(("result", "text"), BAD_RESULTS.values(), ids=BAD_RESULTS.keys())
def test_a_result_that_breaks_a_rule(result: Any, text: str) -> None:
    with pytest.raises(InterfaceError, match=re.escape(text)):
        taken(result)


def test_statistics_become_floats() -> None:
    stats = check_stats({"a": (np.float32(1.5), 2), "none of it": [0, 0]})
    assert stats == {"a": (1.5, 2.0), "none of it": (0.0, 0.0)}
    assert {type(number) for pair in stats.values() for number in pair} == {float}


@pytest.mark.parametrize(
    ("pair", "shown"),
    [
        (3.0, "3.0"),
        (None, "None"),
        ((1.0,), "(1.0)"),
        ((1.0, 2.0, 3.0), "a tuple"),
        ((NAN, 1.0), "(nan, 1.0)"),
        ((1.0, INF), "(1.0, inf)"),
        ((10**400, 1.0), f"({10**400}, 1.0)"),
        ((1.0, -1.0), "(1.0, -1.0)"),
        ((True, 1.0), "(True, 1.0)"),
        ((torch.ones(2), 1.0), "(a tensor [2] of float32, 1.0)"),
        ("ab", "a str"),
    ],
)
def test_a_statistic_that_is_no_pair_of_numbers(pair: Any, shown: str) -> None:
    text = f"statistic 'a' is {shown}, must be a pair (sum, weight) of finite numbers, the weight at least 0; its mean"
    with pytest.raises(InterfaceError, match=re.escape(text)):
        check_stats({"b": (1.0, 1.0), "a": pair})


@pytest.mark.parametrize("name", [3, "", "a\n", "\ud800"])
def test_a_statistic_without_a_name(name: Any) -> None:
    with pytest.raises(InterfaceError, match=re.escape(f"a statistic is named {name!r}, must be a printable string")):
        check_stats({name: (1.0, 1.0)})


def test_a_statistic_that_would_replace_the_number_of_the_step() -> None:
    with pytest.raises(InterfaceError, match="statistic 'step' has a name that every line of "):
        check_stats({"step": (1.0, 1.0)})


def some(value: float = 1.0) -> Tensor:
    return torch.tensor(value, requires_grad=True)


def test_a_loss_that_keeps_the_rules() -> None:
    given = some(2.0)
    loss, unread = check_loss((given, {"a": (1, 2)}), IDS)
    assert loss is given
    assert not unread.loss.requires_grad
    assert read_losses([unread]) == [(2.0, {"a": (1.0, 2.0)})]


def test_scalar_tensors_stand_for_numbers_and_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's sums stay there until the end of a mini-batch."""
    waited: list[int] = []
    read = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: waited.append(len(tensor)) or read(tensor))
    parts = [(2.0, {"a": (torch.tensor(1.5), 2), "b": [3, torch.tensor(4.0)]}), (-1.0, {"a": (torch.tensor(0.5), 1)})]
    unread = [check_loss((some(loss), stats), IDS)[1] for loss, stats in parts]
    assert read_losses(unread) == [(2.0, {"a": (1.5, 2.0), "b": (3.0, 4.0)}), (-1.0, {"a": (0.5, 1.0)})]
    assert waited == [5]
    with pytest.raises(InterfaceError, match=re.escape("statistic 'a' is (nan, 1.0), must be a pair")):
        check_stats({"a": (torch.tensor(NAN), 1.0)})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (some(), "the loss function returned a tensor [] of float32, must be a pair (loss, statistics)"),
        ((some().view(1), {}), "the loss is a tensor [1] of float32, must be a scalar tensor of floating point with"),
        ((1.0, {}), "the loss is 1.0, must be a scalar tensor"),
        ((torch.tensor(1), {}), "the loss is a tensor [] of int64, must be a scalar tensor"),
        ((torch.tensor(1.0), {}), "the loss is a tensor [] of float32, without a gradient, must be a scalar tensor"),
        ((some(INF), {}), "the loss of samples 4, 9 is inf, must be finite; lower the learning rate"),
        ((some(), {"kl": 0.5}), "statistic 'kl' is 0.5, must be a pair"),
    ],
)
def test_a_loss_that_breaks_a_rule(given: Any, text: str) -> None:
    with pytest.raises(InterfaceError, match=re.escape(text)):
        read_losses([check_loss(given, IDS)[1]])


def test_the_samples_of_a_loss_are_not_all_listed() -> None:
    with pytest.raises(InterfaceError, match=re.escape("of samples 0, 1, 2, 3, 4, 5, 6, 7, ... (100 in all) is nan")):
        read_losses([check_loss((some(NAN), {}), range(100))[1]])


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (
            [ONE, ONE],
            "the function given to model.forward returned [a tensor [1] of float32, a tensor [1] of float32]",
        ),
        ({"value": [ONE]}, "column 'value' of the function given to model.forward has 1 tensors for 2 samples"),
    ],
)
def test_columns_of_a_micro_batch(columns: Any, text: str) -> None:
    with pytest.raises(InterfaceError, match=re.escape(text)):
        check_columns(columns, IDS, finite=False)


@pytest.mark.parametrize("answer", [True, False, np.True_, np.False_])
def test_an_end_check_that_answers(answer: Any) -> None:
    assert check_end(answer) is bool(answer)


@pytest.mark.parametrize("answer", [None, 1, "no"])
def test_an_end_check_that_does_not_answer(answer: Any) -> None:
    with pytest.raises(InterfaceError, match=r"is_end, given to model.generate, returned .*, must be True or False"):
        check_end(answer)


def test_numbers_that_a_call_keeps() -> None:
    kept = check_state({"kl": np.float32(0.5), "steps": 3})
    assert kept == {"kl": 0.5, "steps": 3.0}
    assert {type(number) for number in kept.values()} == {float}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([1.0], "context.state is [1.0], must be a dict: numbers by name"),
        ({"a": NAN}, "context.state['a'] is nan, must be a finite number"),
        ({"a": torch.ones(1)}, "context.state['a'] is a tensor [1] of float32, must be a finite number"),
        ({"a": True}, "context.state['a'] is True, must be a finite number"),
        ({3: 1.0}, "context.state has the name 3, must be a printable string of 1 to 64 characters"),
        ({"x" * 65: 1.0}, "must be a printable string of 1 to 64 characters"),
        ({str(i): 1.0 for i in range(65)}, "context.state has 65 numbers, must have at most 64"),
    ],
)
def test_what_a_call_cannot_keep(state: Any, message: str) -> None:
    with pytest.raises(InterfaceError, match=re.escape(message)):
        check_state(state)


@pytest.mark.parametrize(
    ("details", "message"),
    [
        ([1], "the details are [1], must be a dict: RewardDetails by sample"),
        ({4: {}}, "the details of sample 4 are a dict, must be RewardDetails (of realhf.rewards.details)"),
        ({5: RewardDetails()}, "the details have sample 5, which is none of the call's: 4, 9"),
        ({4: RewardDetails(notes=1)}, "the notes of sample 4 are 1, must be a dict: values by name"),  # type: ignore[arg-type]
        (
            {9: RewardDetails(notes={"answer": [1, 2, 3]})},  # type: ignore[dict-item]
            "the notes of sample 9 have 'answer': a list, must be a text, a number, a bool or None under a text",
        ),
        ({9: RewardDetails(notes={3: "x"})}, "the notes of sample 9 have 3: a str, must be"),  # type: ignore[dict-item]
        (
            {9: RewardDetails(rewards={"right": np.float64(1)})},
            "the rewards of sample 9 have 'right': np.float64(1.0), must be a number or None under a text; give float",
        ),
        ({4: RewardDetails(columns={"answer": 3})}, "the columns of sample 4 have 'answer': 3, must be a text"),  # type: ignore[dict-item]
    ],
)
def test_details_that_cannot_be_shown(details: Any, message: str) -> None:
    with pytest.raises(InterfaceError, match=re.escape(message)):
        taken(CallResult(outputs={"reward": [torch.zeros(1)] * 2}, details=details))


def test_details_of_samples() -> None:
    notes = {"answer": "x", "right": True, "number": 3, "none": None}
    details = {9: RewardDetails(rewards={"right": 1, "short": None}, columns={"answer": "x"}, notes=notes)}
    assert taken(CallResult(outputs={"reward": [torch.zeros(1)] * 2}, details=details)).details == details
