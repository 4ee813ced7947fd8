"""The GPU cases of the benchmarks, in small on the CPU, to see that they run."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import on_gpu

    yield on_gpu
    del sys.modules["on_gpu"]


@pytest.mark.slow
def test_the_cases_of_the_gpu_run_on_a_cpu(on_gpu):
    cases = on_gpu.generation_cases(quick=True, device="cpu") + on_gpu.training_cases(quick=True, device="cpu")
    assert len(cases) == 4  # of which the values mean nothing here


def test_the_limits_by_hand(on_gpu):
    """Of a model whose products have 2 x (4 x 4 + 8 + 8 + 16 + 3 x 4 x 6) weights in layers and 10 x 4 in the head."""
    config = on_gpu.replace(
        on_gpu.MODEL, hidden_size=4, intermediate_size=6, num_layers=2, num_heads=2, num_kv_heads=1, vocab_size=10
    )
    weights = 2 * (16 + 8 + 8 + 16 + 72) + 40
    assert on_gpu.step_bytes(config, sequences=3, context=5.0) == 2 * (weights + 2 * 2 * 2 * 5 * 3)
    assert on_gpu.training_flops(config, sequences=3, length=8) == 6 * weights * 24 + 3 * 3 * 2 * 2 * 2 * 4 * 64 / 2
