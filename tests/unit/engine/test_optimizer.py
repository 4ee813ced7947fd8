"""The flat AdamW against torch's own per-parameter one, its schedule against numbers by hand."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.lib.peak_memory import PeakMemory
from realhf.api.experiment import OptimizerConfig
from realhf.engine.train import optimizer as optimizer_module
from realhf.engine.train.optimizer import FlatAdamW, chunks, gradient_dtype, learning_rate, square_sum


def test_learning_rate_by_hand() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=2, final_lr_ratio=0.1)
    rates = [learning_rate(config, step, 5) for step in range(7)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.7, 0.4, 0.1, 0.1])
    cosine = OptimizerConfig(lr=2.0, warmup_steps=1, schedule="cosine", final_lr_ratio=0.2)
    # cos of 0, 60, 90, 120 and 180 degrees: remaining 1, 3/4, 1/2, 1/4, 0 of 1.6, on top of 0.4.
    assert [learning_rate(cosine, step, 7) for step in (0, 1, 3, 4, 5, 7, 9)] == pytest.approx(
        [2.0, 2.0, 1.6, 1.2, 0.8, 0.4, 0.4]
    )
    constant = OptimizerConfig(lr=2.0, warmup_steps=4, schedule="constant")
    assert [learning_rate(constant, step, 6) for step in (0, 1, 3, 5, 9)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    assert learning_rate(OptimizerConfig(lr=2.0), 0, 1) == 2.0
    all_warm = OptimizerConfig(lr=2.0, warmup_steps=3, schedule="linear", final_lr_ratio=0.0)
    assert [learning_rate(all_warm, step, 3) for step in (2, 3, 4)] == [2.0, 2.0, 0.0]
    assert learning_rate(OptimizerConfig(lr=2.0, final_lr_ratio=0.5), 5, 10) == pytest.approx(1.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_steps_equal_torch_adamw(dtype: torch.dtype) -> None:
    config = OptimizerConfig(lr=3e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.2, warmup_steps=1)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, dtype=dtype, generator=generator)
    parameters, reference = start.clone(), torch.nn.Parameter(start.clone())
    ours = FlatAdamW([parameters], config, total_steps=8)
    theirs = torch.optim.AdamW([reference], betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2, foreach=False, fused=False)
    for step in range(6):
        gradient = torch.randn(50, dtype=dtype, generator=generator)
        theirs.param_groups[0]["lr"] = learning_rate(config, step, 8)
        reference.grad = gradient.clone()
        theirs.step()
        assert ours.lr == learning_rate(config, step, 8)
        ours.step([gradient])
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(parameters, reference.detach(), rtol=tolerance, atol=tolerance)
    state = theirs.state[reference]
    for key in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(ours.state[key], state[key], rtol=tolerance, atol=tolerance)
    assert ours.step_count == 6


def test_bfloat16_parameters_follow_a_float32_master() -> None:
    config = OptimizerConfig(lr=1e-4, final_lr_ratio=1.0)
    parameters = torch.ones(8, dtype=torch.bfloat16)
    optimizer = FlatAdamW([parameters], config, total_steps=1)
    for _ in range(5):  # one step of 1e-4 alone is lost in bfloat16, whose numbers below 1 are 0.004 apart
        optimizer.step([torch.ones(8, dtype=torch.bfloat16)])
        assert (parameters == 1.0).all()
    assert optimizer.state["master"].dtype == optimizer.state["exp_avg"].dtype == torch.float32
    torch.testing.assert_close(optimizer.state["master"], torch.full((8,), 1 - 5e-4), rtol=0, atol=1e-6)
    for _ in range(25):
        optimizer.step([torch.ones(8, dtype=torch.bfloat16)])
    assert (parameters < 1.0).all()
    parameters.fill_(3.0)
    optimizer.parameters_changed()
    assert (optimizer.state["master"] == 3.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_offloaded_states_give_the_same_steps(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "_CPU_CHUNK", 64)  # three chunks
    generator = torch.Generator().manual_seed(2)
    start, gradients = torch.randn(150, generator=generator).to(dtype), torch.randn(4, 150, generator=generator)
    here, there = (
        FlatAdamW([start.clone()], OptimizerConfig(lr=1e-2, weight_decay=0.1, offload_states=offload), total_steps=4)
        for offload in (False, True)
    )
    kept = dict(there.state)
    for gradient in gradients:
        here.step([gradient])
        there.step([gradient])
        assert all(there.state[kind] is tensor and tensor.device.type == "cpu" for kind, tensor in kept.items())
    assert not torch.equal(here.parameters[0], start)
    assert torch.equal(here.parameters[0], there.parameters[0])
    assert all(torch.equal(tensor, there.state[kind]) for kind, tensor in here.state.items())


def test_resumes_from_state_and_step() -> None:
    config = OptimizerConfig(lr=1e-2, warmup_steps=3)
    gradients = torch.randn(6, 20, generator=torch.Generator().manual_seed(1))

    def steps(optimizer: FlatAdamW, rows: range) -> None:
        for row in rows:
            optimizer.step([gradients[row]])

    straight = FlatAdamW([torch.ones(20)], config, total_steps=6)
    steps(straight, range(6))
    first = FlatAdamW([torch.ones(20)], config, total_steps=6)
    steps(first, range(3))
    second = FlatAdamW([first.parameters[0].clone()], config, total_steps=6)
    for key, value in second.state.items():
        value.copy_(first.state[key])
    second.step_count = first.step_count
    steps(second, range(3, 6))
    assert torch.equal(second.parameters[0], straight.parameters[0])


def test_a_step_and_the_norm_take_memory_for_a_chunk_alone() -> None:
    """Not a copy of the gradients in the precision of the states, nor in that of the norm."""
    parameters = torch.zeros(40 * 1024, dtype=torch.bfloat16)
    gradients = torch.ones(40 * 1024, dtype=torch.bfloat16)
    optimizer = FlatAdamW([parameters], OptimizerConfig(), total_steps=1)
    with mock.patch.object(optimizer_module, "_CPU_CHUNK", 1024), PeakMemory() as memory:
        assert square_sum(gradients).item() == 40 * 1024
        optimizer.step([gradients], 0.5)
    assert 0 < memory.peak_bytes <= 3 * 8 * 1024
    assert (gradients == 1.0).all()


@pytest.mark.parametrize("scale", [0.25, 0.5, 2.0])
def test_scaled_gradients_give_the_step_of_scaled_gradients(scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    start, gradients = torch.randn(100, generator=generator), torch.randn(3, 100, generator=generator)
    ours, theirs = (FlatAdamW([start.clone()], OptimizerConfig(lr=1e-2), total_steps=3) for _ in range(2))
    for gradient in gradients:
        ours.step([gradient], scale)
        theirs.step([gradient * scale])
    assert torch.equal(ours.parameters[0], theirs.parameters[0])
    assert not torch.equal(ours.parameters[0], start)


def test_sums_of_gradients_are_in_float32_at_least_unless_asked_otherwise() -> None:
    wide, narrow = OptimizerConfig(), OptimizerConfig(fp32_gradients=False)
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    assert [gradient_dtype(dtype, wide) for dtype in dtypes] == [torch.float32, torch.float32, torch.float64]
    assert [gradient_dtype(dtype, narrow) for dtype in dtypes] == list(dtypes)


def test_a_vector_is_passed_over_in_parts_that_suit_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "_CPU_CHUNK", 4)
    monkeypatch.setattr(optimizer_module, "OPTIMIZER_ELEMENTS", 6)
    for device, parts in (("cpu", [(0, 4), (4, 8), (8, 12)]), ("meta", [(0, 6), (6, 12)])):
        found = list(chunks(torch.empty(9, device=device)))
        assert [(part.start, part.stop) for part in found] == parts
    assert list(chunks(torch.empty(0))) == []


def test_sums_of_squares_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "_CPU_CHUNK", 4)
    monkeypatch.setattr(optimizer_module.fused, "takes", lambda *_: False)
    total = square_sum(torch.tensor([1.0, -2.0, 3.0, 1e4, 5.0, 6e-2]))
    assert (total.item(), total.dtype, total.shape) == (pytest.approx(100_000_039.0036, rel=1e-10), torch.float64, ())
    nothing = square_sum(torch.empty(0))
    assert (nothing.item(), nothing.dtype, nothing.shape) == (0.0, torch.float64, ())


def test_parts_of_an_arena_are_updated_as_one_vector() -> None:
    arena, whole = torch.linspace(-1, 1, 20), torch.linspace(-1, 1, 20)
    parts = [arena[2:7], arena[9:9], arena[11:20]]
    config = OptimizerConfig(lr=1e-2, weight_decay=0.3)
    ours, theirs = FlatAdamW(parts, config, 3), FlatAdamW([whole], config, 3)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        gradient = torch.randn(20, generator=generator)
        ours.step([gradient[2:7], gradient[9:9], gradient[11:20]])
        theirs.step([gradient])
    updated = torch.cat([whole[2:7], whole[11:20]])
    assert torch.equal(torch.cat([arena[2:7], arena[11:20]]), updated)
    assert torch.equal(arena[[0, 1, 7, 8, 9, 10]], torch.linspace(-1, 1, 20)[[0, 1, 7, 8, 9, 10]])
    assert torch.equal(ours.state["exp_avg"], torch.cat([theirs.state["exp_avg"][a:b] for a, b in ((2, 7), (11, 20))]))
    assert [len(vector) for vector in ours.state.values()] == [14, 14]


class Part:
    """A vector of parameters on a device that is not there."""

    dtype, device = torch.float32, torch.device("cuda")

    def __len__(self) -> int:
        return 5

    def detach(self) -> "Part":
        return self


@pytest.mark.parametrize(("offloads", "device"), [(True, "cpu"), (False, "cuda")])
def test_states_lie_beside_the_parameters_or_in_host_memory_that_copies_need_not_wait_for(
    monkeypatch: pytest.MonkeyPatch, offloads: bool, device: str
) -> None:
    made: list[Any] = []

    def zeros(*size: int, **more: Any) -> Any:
        made.append((*size, more["dtype"], more["device"].type, more["pin_memory"]))
        return SimpleNamespace()

    monkeypatch.setattr(torch, "zeros", zeros)
    parts: Any = [Part(), Part()]
    optimizer = FlatAdamW(parts, OptimizerConfig(offload_states=offloads), 1)
    assert made == [(10, torch.float32, device, offloads)] * 2
    assert optimizer.on_device() == ([] if offloads else list(optimizer.state.values()))
    monkeypatch.undo()
    here = FlatAdamW([torch.zeros(3)], OptimizerConfig(offload_states=offloads), 1)
    assert [vector.is_pinned() for vector in here.state.values()] == [False, False]


def test_states_in_host_memory_come_to_the_parameters_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that has shapes alone."""

    class ReachedError(Exception):
        pass

    def adamw(*lists: list[torch.Tensor], **about: Any) -> None:
        parameters, _, first, second, _, steps = lists
        assert [tensor.device.type for tensor in (*parameters, *first, *second, *steps)] == ["meta"] * 4
        raise ReachedError

    monkeypatch.setattr(optimizer_module, "adamw", adamw)
    optimizer = FlatAdamW([torch.empty(4, device="meta")], OptimizerConfig(offload_states=True), 1)
    assert [vector.device.type for vector in optimizer.state.values()] == ["cpu", "cpu"]
    with pytest.raises(ReachedError):
        optimizer.step([torch.empty(4, device="meta")])
