"""What is made beside tensors of a device lies on it. The device here is one without memory."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.algorithms import functional as F
from realhf.algorithms.responses import last_scores
from realhf.algorithms.reward.functions import with_samples
from realhf.algorithms.samples import at_tokens, in_groups, lengths_of, of_ids, valid_column
from realhf.algorithms.script.update import UpdateInterface, optimizer_steps
from realhf.algorithms.text_reward import interface as text_reward
from realhf.api import SEQUENCE_MEAN, TOKEN_MEAN, Columns, loss_function, sequence_sum_over
from realhf.api.script.views import View
from realhf.engine.batch import Batch
from tests.unit.algorithms.conftest import SingleContext
from tests.unit.algorithms.script_rollouts import ROLLOUT, negative, term, update_of

META = torch.device("meta")


def away(*lengths: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.zeros(length, dtype=dtype, device=META) for length in lengths]


BATCH = Batch((0, 1), {"prompt": away(1, 2, dtype=torch.int64), "seq": away(3, 4, dtype=torch.int64)})


@pytest.mark.parametrize(
    ("make", "shape", "dtype"),
    [
        (lambda: lengths_of(away(2, 3)), (2,), torch.int64),
        (lambda: of_ids(torch.zeros(2, 2, device=META), (0, 3)), (2,), torch.float32),
        (lambda: valid_column(torch.tensor([True, False]), away(1, 1))[1], (1,), torch.float64),
        (lambda: torch.cat(at_tokens(away(2)[0], torch.tensor([2, 3]))), (5,), torch.float64),
        (lambda: F.predicting_positions([3, 4], [1, 2], META), (4,), torch.int64),
        (lambda: F.last_positions([3, 4], META), (2,), torch.int64),
        (lambda: F.response_sums(away(5)[0], lengths_of(away(2, 3))), (5,), torch.float64),
        (lambda: F.response_means(away(5)[0], lengths_of(away(2, 3))), (5,), torch.float64),
        (lambda: text_reward._column([(0.5,), (1.0, 2.0)], META)[1], (2,), torch.float32),
        (lambda: last_scores(away(7)[0], BATCH)[1], (1,), torch.float64),
    ],
)
def test_numbers_are_made_where_their_tensors_are(
    make: Callable[[], Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    made = make()
    assert (made.device.type, tuple(made.shape), made.dtype) == ("meta", shape, dtype)


class Recording(SingleContext):
    """Sums, of which the devices and types are kept; each is a number of the host that is not 0."""

    def __init__(self, **surroundings: Any):
        super().__init__(**surroundings)
        self.seen: list[tuple[str, torch.dtype]] = []

    def sum_over_data_parallel(self, values: Tensor) -> Tensor:
        self.seen.append((values.device.type, values.dtype))
        return torch.ones(values.shape, dtype=values.dtype)

    sum_over_outputs = sum_over_data_parallel


def test_rewards_of_groups_are_put_in_order_where_they_are() -> None:
    context = Recording(batch_size=2, samples_per_prompt=2)
    in_groups(context, (0, 1), away(2)[0], torch.tensor([True, False]))
    assert context.seen == [("meta", torch.float64)]


def test_the_divergence_of_a_step_is_added_up_on_the_device_of_the_call() -> None:
    context = Recording()
    optimizer_steps(lambda batch: {}, [0, 1], context, META, epochs=1, max_kl=2.0)
    assert context.seen == [("meta", torch.float64)]


class Taking:
    """A critic that takes a batch to train on, and computes its loss from outputs of a device."""

    config = SimpleNamespace(head="scalar")

    def __init__(self, head: Tensor | None = None):
        self.head = head
        self.batches: list[Batch] = []
        self.losses: list[Tensor] = []

    def train_step(self, batch: Batch, key: str, loss: Any, weight: Any, micro_batches: int) -> dict[str, Any]:
        self.batches.append(batch)
        if self.head is not None:
            self.losses.append(loss(self.head, batch)[0])
        return {}


@pytest.mark.parametrize("reduction", [TOKEN_MEAN, SEQUENCE_MEAN, sequence_sum_over(3)])
def test_an_update_computes_where_its_sequences_are(reduction: Any) -> None:
    examples = View((("tokens", "tokens"), ("prompt_length", "prompt_length"), ("loss_mask", "loss_mask")))
    batch = BATCH.with_data(
        tokens=away(2, 2, dtype=torch.int64), prompt_length=[torch.ones(1)] * 2, loss_mask=[torch.ones(2)] * 2
    )
    terms = tuple(
        term(loss_function(negative, reduction)(), view, rows=rows)
        for view, rows in ((ROLLOUT, "rollout"), (examples, "examples"))
    )
    model, context = Taking(), Recording()
    UpdateInterface(update_of(*terms)).train_step(model, [batch], context)
    assert context.seen == [("meta", torch.float64)]
    [rows] = model.batches
    assert {value.device.type for name in ("prompt", "seq") for value in rows.data[name]} == {"meta"}
    empty = [value for column in rows.data.values() for value in column if not len(value)]
    assert {value.device.type for value in empty} == {"meta"}
    model = Taking(torch.zeros(7, device=META))
    UpdateInterface(update_of(terms[0])).train_step(model, [batch], Recording())
    assert [(loss.device.type, loss.shape) for loss in model.losses] == [("meta", ())]


def test_pairs_of_scores_are_compared_where_they_are() -> None:
    data = {"prompt": away(1, 1), "chosen": away(3, 2), "rejected": away(2, 2)}
    view = View(tuple((key, key) for key in data))

    def difference(chosen: Tensor, rejected: Tensor, batch: Batch) -> Tensor:
        return rejected - chosen

    made = term(loss_function(difference)(), view, rows="pairs")
    model = Taking(torch.zeros(9, device=META))
    UpdateInterface(update_of(made)).train_step(model, [Batch((0, 1), data)], Recording())
    assert [loss.device.type for loss in model.losses] == ["meta"]
    assert [batch.together for batch in model.batches] == [2], "the sequences of a pair stay together"
    made_pairs = with_samples(Columns((1, 3), data | {"sample": away(4, 4)}))
    assert {flag.device.type for flag in made_pairs["is_sample"]} == {"meta"}
