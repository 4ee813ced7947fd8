"""HybridFlow's Table 2: what the planner moves and counts is what the paper's formulas say."""

from collections.abc import Sequence
from fractions import Fraction
from typing import get_args

import pytest
from lib.hybridflow_transition import Engine, Transition, transition

from realhf.architecture.model import DecoderConfig
from realhf.geometry.boxes import Box
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.parameters import decoder_parameters

MODEL = DecoderConfig(
    hidden_size=1024, intermediate_size=2048, num_layers=8, num_heads=8, num_kv_heads=8, vocab_size=1024
)
# What is divided evenly, as the formulas take the whole model: over tp and pp the matrices of the layers, over ZeRO-3's
# ranks everything.
MATRICES = {s.name: s.size for s in decoder_parameters(MODEL) if s.place == "layer" and s.shard_dim is not None}
EVEN: dict[Engine, dict[str, int]] = {
    "deepspeed-chat": {spec.name: spec.size for spec in decoder_parameters(MODEL)},
    "hybridflow-v": MATRICES,
    "hybridflow": MATRICES,
}

FIGURE_8 = (1, 4, 2, 1, 2)
CASES = [  # p, t, d in training, p_g, t_g in generation
    FIGURE_8,
    (1, 8, 1, 1, 2),
    (1, 8, 1, 1, 4),
    (1, 2, 4, 1, 1),
    (2, 2, 2, 1, 1),
    (2, 2, 2, 1, 2),
    (2, 2, 2, 2, 1),
    (2, 4, 1, 1, 4),
    (2, 4, 2, 1, 2),
    (4, 2, 1, 2, 1),
    (4, 2, 2, 1, 2),
    (4, 4, 1, 2, 2),
    (8, 1, 1, 2, 1),
    (8, 2, 1, 4, 1),
    (2, 8, 1, 1, 4),
]


def of_even_parameters(engine: Engine, p: int, t: int, d: int, p_g: int, t_g: int) -> Transition:
    training = Layout(DeviceMesh(0, p * t * d), ParallelStrategy(d, t, p))
    whole = transition(engine, MODEL, training, tp=t_g, pp=p_g)

    def even(boxes: Sequence[Box]) -> list[Box]:
        return [box for box in boxes if box.name in EVEN[engine]]

    return Transition(
        kept={device: even(boxes) for device, boxes in whole.kept.items()},
        gathered={device: even(boxes) for device, boxes in whole.gathered.items()},
        computes={device: even(boxes) for device, boxes in whole.computes.items()},
    )


def table_2(engine: Engine, p: int, t: int, d: int, p_g: int, t_g: int) -> tuple[Fraction, Fraction]:
    """Bytes received by a device and peak memory of parameters on it, as parts of the model."""
    match engine:
        case "deepspeed-chat":
            return Fraction(t * p * d - 1, t * p * d), Fraction(1)
        case "hybridflow-v":
            return Fraction(t * p - 1, t * p), Fraction(1)
        case "hybridflow":
            return Fraction(t * p - t_g * p_g, t_g * p_g * t * p), Fraction(1, t_g * p_g)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "p{}-t{}-d{} to p{}-t{}".format(*case))
@pytest.mark.parametrize("engine", get_args(Engine))
def test_bytes_and_peak_memory_are_those_of_the_formulas(engine: Engine, case: tuple[int, int, int, int, int]) -> None:
    p, t, d, p_g, t_g = case
    found = of_even_parameters(engine, p, t, d, p_g, t_g)
    received, peak = (4 * part * sum(EVEN[engine].values()) for part in table_2(engine, p, t, d, p_g, t_g))
    for device in range(p * t * d):
        assert found.received_bytes(device) == received
        assert found.peak_bytes(device) == peak
    if engine == "hybridflow":
        assert all(found.unused_bytes(device) == 0 for device in range(p * t * d))


def test_what_is_kept_unused_on_figure_8() -> None:
    """Ungrouped, half of the devices generate with another part than they train, and keep M / 4 beside it."""
    found = of_even_parameters("hybridflow-v", *FIGURE_8)
    parts = [Fraction(found.unused_bytes(device), 4 * sum(MATRICES.values())) for device in range(8)]
    assert parts == [0, Fraction(1, 4), Fraction(1, 4), 0] * 2


def test_a_whole_model_on_figure_8_in_numbers() -> None:
    """Llama 7B as ReaL has it: its norms are on every rank, so they never move; all else is divided by tp."""
    llama = DecoderConfig(
        hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8, vocab_size=128256
    )
    training = Layout(DeviceMesh(0, 8), ParallelStrategy(dp=2, tp=4))
    found = transition("hybridflow", llama, training, tp=2, pp=1)
    norms = (2 * 32 + 1) * 4096
    matrices = 8_030_261_248 - norms
    assert [found.received_bytes(device) for device in range(8)] == [4 * matrices // 4] * 8
    assert [found.peak_bytes(device) for device in range(8)] == [4 * (matrices // 2 + norms)] * 8


def test_degrees_that_contain_nothing_are_refused() -> None:
    training = Layout(DeviceMesh(0, 8), ParallelStrategy(dp=2, tp=4))
    with pytest.raises(ValueError, match="dp2 tp4 pp1 on devices 0-7 is not contained in tp=1, pp=2"):
        transition("hybridflow", MODEL, training, tp=1, pp=2)
