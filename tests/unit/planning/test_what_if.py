"""What if models were larger, sequences longer, engines others: what a request says, and what it leaves as it is."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from realhf.api.experiment import ModelSetup
from realhf.architecture.compute import ComputeConfig
from realhf.architecture.named import architecture
from realhf.base.errors import UserError
from realhf.planning.model.features import ENGINE
from realhf.planning.what_if import WhatIf, WhatIfRequest, keys_without_producer
from tests.unit.planning.graphs import ppo

CALLS = list(ppo().calls.values())
FULL = ModelSetup(compute=ComputeConfig(recomputation="full"))


def test_other_architectures_come_with_the_lengths_of_published_measurements(tmp_path: Path) -> None:
    """Unless something else is said, and responses are no longer than the longest of a file."""
    assert WhatIf().with_defaults() == WhatIf()
    larger = WhatIf(model_types={"actor": "llama7b"})
    found = larger.with_defaults()
    assert (found.prompt_tokens, found.new_tokens, found.dtype) == (1024, 1024, "bfloat16")
    given = replace(larger, prompt_tokens=5, new_tokens=6, dtype="float32")
    assert given.with_defaults() == given
    lengths = tmp_path / "lengths"
    lengths.write_text("3\n700\n9\n")
    assert replace(larger, response_lengths=lengths).with_defaults().new_tokens == 700
    assert WhatIf().responses is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"staleness": -1}, "--staleness -1 is not from"), ({"staleness": 65}, "--staleness 65 is not from 0 to 64"),
     ({"batch_size": 0}, "--batch-size 0 is not from"), ({"features": ("wings",)}, "feature 'wings' is not known"),
     ({"prompt_tokens": 0}, "--prompt-tokens 0 is not from"), ({"new_tokens": 0}, "--new-tokens 0 is not from")],
)  # fmt: skip
def test_what_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        WhatIf(**fields)


def test_the_engine_in_question() -> None:
    """As a model's setup says, with other features; it copies checkpoints where the run writes them on the way."""
    what_if = WhatIf(features=("no-zero1",))
    assert what_if.engine() == replace(ENGINE, zero1=False)
    full = what_if.engine(FULL, saves=True)
    assert (full.recomputation, full.zero1, full.copies_checkpoints) == ("full", False, True)
    assert what_if.engine(FULL).copies_checkpoints is False
    assert what_if.unlike([FULL, ModelSetup()]) == ["no-zero1"]
    assert WhatIf().unlike([FULL]) == []


def test_a_plan_may_choose_what_neither_the_setup_nor_the_features_fix() -> None:
    assert "recomputation" in WhatIf().open_choices(ModelSetup())
    assert "recomputation" not in WhatIf().open_choices(FULL)
    named = WhatIf(features=("no-recomputation", "sequence-parallel")).open_choices(ModelSetup())
    assert named == tuple(
        choice for choice in WhatIf().open_choices(ModelSetup()) if choice not in ("recomputation", "sequence_parallel")
    )


def test_architectures_are_replaced_under_their_own_heads() -> None:
    found = WhatIf(model_types={"critic": "llama7b"}).apply(CALLS)
    larger = architecture("llama7b").with_head("scalar")
    assert [call.config for call in found] == [larger if call.model_name == "critic" else call.config for call in CALLS]
    assert [call.name for call in found] == [call.name for call in CALLS]
    with pytest.raises(
        UserError, match=r"--model-type judge=\.\.\.: no call uses such a model; there are actor, reward, ref, critic$"
    ):
        WhatIf(model_types={"judge": "llama7b"}).apply(CALLS)


def test_one_case_for_each_staleness_in_ascending_order() -> None:
    given = WhatIf(batch_size=3)
    asked = WhatIfRequest(stalenesses="2, 0,1,2", features=" zero1 ,,no-recomputation", given=given)
    assert asked.cases(CALLS) == [
        WhatIf(batch_size=3, staleness=k, features=("zero1", "no-recomputation")) for k in (0, 1, 2)
    ]
    assert WhatIfRequest().cases(CALLS) == [WhatIf()]
    with pytest.raises(UserError, match="--staleness 1,x must be whole numbers, separated by commas"):
        WhatIfRequest(stalenesses="1,x").cases(CALLS)
    with pytest.raises(UserError, match=r"--staleness 9{20} is not from 0 to 64"):
        WhatIfRequest(stalenesses="9" * 5000).cases(CALLS)


def test_architectures_of_roles_and_of_models() -> None:
    """That of one model goes before that of its role."""
    asked = WhatIfRequest(actor="llama7b", critic="llama13b", model_types=("reward=llama34b", "ref=a=b"))
    [case] = asked.cases(CALLS)
    assert case.model_types == {"actor": "llama7b", "ref": "a=b", "reward": "llama34b", "critic": "llama13b"}
    [actors] = WhatIfRequest(actor="llama7b").cases(CALLS)
    assert actors.model_types == {"actor": "llama7b", "ref": "llama7b"}


@pytest.mark.parametrize("pair", ["actor", "=llama7b", "actor="])
def test_architectures_of_another_form(pair: str) -> None:
    with pytest.raises(
        UserError, match=f"--model-type {pair}: write it NAME=ARCHITECTURE, for example actor=llama3-70b"
    ):
        WhatIfRequest(model_types=(pair,)).cases(CALLS)


def test_a_role_that_no_model_has() -> None:
    calls = [call for call in CALLS if call.model_name in ("actor", "ref")]
    with pytest.raises(
        UserError,
        match="--critic llama7b: no model is named critic or reward or cost; the experiment has actor, ref, so give "
        "--model-type NAME=llama7b",
    ):
        WhatIfRequest(critic="llama7b").cases(calls)


def test_keys_that_a_data_set_would_have() -> None:
    assert keys_without_producer(CALLS) == ("prompts",)
    assert keys_without_producer(CALLS[1:]) == ("seq", "logp")
