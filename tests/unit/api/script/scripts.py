"""Parts of scripts, and what is asked of experiments that are made of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from realhf.api import (
    Columns,
    GenerationOptions,
    UserError,
    loss_function,
    tensor_function,
)


@dataclass(frozen=True, kw_only=True)
class Hyperparameters(GenerationOptions):
    max_new_tokens: int = 5
    clip: float = 0.2
    epochs: int = 1


@tensor_function
def joined(*columns: Columns) -> dict[str, Any]:
    return {}


@loss_function
def some_loss(logprob: Any, batch: Any) -> Any:
    return -logprob


def calls(experiment: Any) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """By name the inputs and outputs of the calls, in their order."""
    return {call.name: (call.input_data, call.output_data) for call in experiment.rpcs}


def wrong(experiment: Any, script: Any) -> str:
    with pytest.raises(UserError) as caught:
        _ = experiment(script).rpcs
    return str(caught.value)


def held_out(experiment: Any, script: Any, data: Path, **fields: Any) -> Any:
    (data / "held_out.jsonl").write_text('{"prompt": "ab>", "answer": "ab", "chosen": "ab", "rejected": "b"}\n' * 6)
    return experiment(script, eval_data=(str(data / "held_out.jsonl"),), **fields).evaluation
