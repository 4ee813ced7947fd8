"""Losses that scripts measure without a step, against those of updates."""

from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.algorithms.script.update import MeasureInterface, UpdateInterface
from realhf.api import (
    Columns,
    loss_function,
)
from realhf.api.script.config import Measure, Update
from realhf.api.script.views import Application, View
from realhf.engine.batch import Batch
from realhf.parallel.divergence import Target
from realhf.parallel.vocabulary import WholeLogits
from tests.unit.algorithms.script_rollouts import ROLLOUT, logprobs_of, pairs, rollouts


def test_measuring_a_loss_changes_nothing(language_model: Any, context: Any) -> None:
    def loss(logprob: Tensor, batch: Batch) -> Any:
        return -2 * logprob, {"mine": (float(len(batch)), 1.0)}

    batch = rollouts(valid=[torch.tensor([v]) for v in (1.0, 0.0, 1.0, 0.0)])
    view, model = View((*ROLLOUT.columns, ("valid", "valid"))), language_model()
    before = model.module.head.weight.clone()
    each = logprobs_of(model, batch.data["seq"], batch.data["prompt"])
    config = Measure(loss_function(loss)(), batch=view, prefix="actor")
    for parts in (1, 2):
        stats = MeasureInterface(config).inference(model, batch, context(micro_batches=parts)).stats
        assert stats["actor_loss"] == pytest.approx((-2 * (each[0].sum() + each[2].sum()).item(), 5.0))
        assert stats["mine"] == (2.0, parts)
    assert torch.equal(model.module.head.weight, before)
    assert set(stats) == {"actor_loss", "mine", "response_length"}
    drawn = View((*ROLLOUT.columns, ("logprob", "logprob")))
    with_logprob = Measure(loss_function(loss)(), batch=drawn, prefix="actor", reports=())
    drawn_batch = rollouts(logprob=[x.detach() for x in each])
    stats = MeasureInterface(with_logprob).inference(model, drawn_batch, context()).stats
    assert set(stats) == {"actor_loss", "mine"}
    nothing = rollouts(valid=[torch.zeros(1)] * 4)
    assert MeasureInterface(config).inference(model, nothing, context()).stats == {}
    assert MeasureInterface(config).inference(model, nothing, context(holds_outputs=False)).stats == {}
    assert MeasureInterface(with_logprob).inference(model, drawn_batch, context(holds_outputs=False)).stats == {}


def counted_marks(rows: Columns) -> Any:
    return {"mark": [torch.ones(1)] * len(rows)}, {"marks": (float(len(rows)), 2.0)}


@pytest.mark.parametrize("kind", ["rollout", "pairs", "values"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_measured_loss_is_that_of_the_update_before_its_step(
    language_model: Any, scalar_model: Any, context: Any, kind: str, parts: int
) -> None:
    """With all statistics that the update gives, but for those of its optimizer; some samples do not count."""

    def of_tokens(
        logprob: Tensor, batch: Batch, *, entropy: Tensor, is_top: Tensor, divergence: Any
    ) -> tuple[Tensor, Any]:
        target = torch.randn(len(logprob), 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        loss = -logprob + 0.1 * entropy + divergence(Target(target.log_softmax(-1)), 0.5)
        return loss, {"top": (float(is_top.sum()), float(len(logprob)))}

    def of_values(value: Tensor, batch: Batch) -> Tensor:
        return value.square()

    def of_pairs(chosen: Tensor, rejected: Tensor, batch: Batch) -> tuple[Tensor, Any]:
        return -(chosen - rejected), {"margin": (float((chosen - rejected).detach().sum()), float(len(chosen)))}

    is_valid = [torch.tensor([float(i in (0, 3))]) for i in range(4)]
    drawn = [torch.full((n,), -0.5, dtype=torch.float64) for n in (3, 1, 2, 4)]
    batch = rollouts(valid=is_valid, logprob=drawn, reward=[torch.tensor([0.5])] * 4)
    view, loss, rows = View(tuple((key, key) for key in batch.data)), of_tokens, "rollout"
    if kind == "pairs":
        (batch, view), loss, rows = pairs(), of_pairs, "pairs"  # type: ignore[assignment]
    if kind == "values":
        loss = of_values  # type: ignore[assignment]
    view = View(view.columns, Application(3, counted_marks, (view,), ()))
    make = scalar_model if kind == "values" else language_model
    bound = loss_function(loss)(reduction="sequence_mean" if kind == "rollout" else None)
    given: dict[str, Any] = {"batch": view, "rows": rows, "prefix": "actor"}
    model, same = make(), make()
    if kind == "rollout":  # as the engine gives them
        for one in (model, same):
            one.head = lambda part, key, head=one.head: WholeLogits(head(part, key))
    before = [parameter.clone() for parameter in model.module.parameters()]
    measured = MeasureInterface(Measure(bound, **given, name="computed")).inference(
        model, batch, context(micro_batches=parts)
    )
    assert measured.outputs == {}
    for parameter, old in zip(model.module.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
        assert parameter.grad is None
    stats = UpdateInterface(Update(bound, **given)).train_step(same, [batch], context(micro_batches=parts)).stats
    assert stats.pop("actor_grad_norm")[0] > 0
    del stats["actor_lr"]
    means = {f"computed_{name}": total / weight for name, (total, weight) in stats.items()}
    assert {name: total / weight for name, (total, weight) in measured.stats.items()} == pytest.approx(means, rel=1e-12)
    assert {"computed_actor_loss", "computed_marks"} < set(means)
    assert ("computed_reward_mean" in means) == (kind != "pairs")
