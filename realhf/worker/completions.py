"""Completions for people: a few samples of each step as texts, with the rewards that a call has just given them."""

from collections.abc import Sequence
from itertools import chain

from msgspec.structs import replace
from torch import Tensor

from realhf.data.rows import DatasetRows
from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult
from realhf.rewards.details import NO_DETAILS, RewardDetails
from realhf.transport.messages import BatchKey, Completion

MOST_CHARACTERS = 20_000  # in a text
# In all prompts of a call, and in all responses: with four bytes each they fit into a message.
MOST_IN_ALL = 2_000_000


def shown_samples(batch: BatchKey, batch_size: int, number: int | None) -> list[int]:
    """The ids of the samples that a step shows to people, at most `number`: evenly spread, different ones in the next
    step, the same in every run. All evaluations show the same samples, those of the first batch. None: all of them."""
    if number is None:
        return list(range(batch_size))
    number = min(number, batch_size)
    if batch.split == "train":
        return sorted((batch.step + i * (batch_size // number)) % batch_size for i in range(number))
    return [i * (batch_size // number) for i in range(number)] if batch.step == 0 else []


def completions(
    call: ModelFunctionCallDef,
    batch: BatchKey,
    data: Sequence[Batch],
    result: CallResult,
    rows: DatasetRows,
    number: int | None,
) -> tuple[Completion, ...]:
    """Those of this rank, if the call reads sequences (`seq`) and makes their rewards (`reward`); else none.

    The prompt is the data set's column `prompt`. Texts have their special tokens, and lose their
    middle where they are long.
    """
    if number == 0 or "seq" not in call.input_data or "reward" not in result.outputs:
        return ()
    wanted = set(shown_samples(batch, rows.samples(batch.step), number))
    ids, sequences = [sample for part in data for sample in part.ids], list(chain(*(part.data["seq"] for part in data)))
    shown = [
        (sample, sequence.tolist(), reward)
        for sample, sequence, reward in zip(ids, sequences, result.outputs["reward"], strict=True)
        if sample in wanted
    ]
    most = min(MOST_CHARACTERS, MOST_IN_ALL // max(1, len(shown)))
    prompts = [row.get("prompt") for row in rows.tokens(batch.step, [sample for sample, _, _ in shown])]
    return tuple(
        Completion(
            sample=sample,
            prompt=_shortened(rows.text(prompt), most),
            response=_shortened(rows.text(sequence[len(prompt) :]), most),
            reward=_total(reward, len(sequence) - len(prompt)),
            details=_shown(result.details.get(sample, NO_DETAILS), most),
        )
        for (sample, sequence, reward), prompt in zip(shown, prompts, strict=True)
        if prompt is not None
    )


def _total(reward: Tensor, tokens: int) -> float | None:
    """The number that it is; of numbers for the `tokens` of the response their sum; None: it is neither."""
    return float(reward.double().sum()) if reward.numel() == 1 or reward.shape == (tokens,) else None


def _shown(details: RewardDetails, most: int) -> RewardDetails:
    columns = {name: _shortened(text, most) for name, text in details.columns.items()}
    return replace(details, columns=columns) if columns else details


def _shortened(text: str, most: int) -> str:
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"
