"""Random numbers against published vectors and statistics; draws against hand-worked distributions."""

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from realhf.engine.generate import sampling
from realhf.engine.generate.sampling import Truncation, draw, philox, replay, tempered_logprobs, uniform

# Known answers of Philox-4x32-10 from the Random123 distribution (file kat_vectors): counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    words = philox(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(int(w) for w in words) == expected


def test_uniform_never_changes():
    """A change here silently changes every run with a given seed."""
    values = uniform(7, 3, torch.tensor([0, 1, 5]), torch.tensor([4, 4, 900]))
    assert values.tolist() == [0.6025261397632685, 0.018134032008595424, 0.6265818255352736]


def test_uniform_takes_its_bits_from_philox():
    (words, expected) = (KNOWN_ANSWERS[0][2], uniform(0, 0, torch.tensor([0]), torch.tensor([0])).item())
    assert expected == ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53


def test_uniform_belongs_to_the_key_and_not_to_the_call():
    ids, positions = torch.arange(6)[:, None], torch.arange(10)
    table = uniform(1, 2, ids, positions)
    assert table.shape == (6, 10)
    assert uniform(1, 2, torch.tensor([4]), torch.tensor([7])).item() == table[4, 7].item()
    # No part of the key is ignored, the high half of the seed included.
    others = [uniform(seed, step, ids, positions) for seed, step in [(2, 2), (1, 3), (1 + 2**32, 2)]]
    assert torch.cat([table, *others]).unique().numel() == 4 * 60


@pytest.mark.parametrize(("seed", "step"), [(-1, 0), (2**64, 0), (0, -1), (0, 2**32)])
def test_uniform_refuses_what_does_not_fit(seed, step):
    with pytest.raises(ValueError, match="does not fit"):
        uniform(seed, step, torch.tensor([0]), torch.tensor([0]))


def test_uniform_takes_the_largest_seed_and_step():
    ends = [uniform(seed, step, torch.tensor([2**32 - 1]), torch.tensor([2**32 - 1])).item()
            for seed, step in ((0, 0), (2**64 - 1, 0), (0, 2**32 - 1))]  # fmt: skip
    assert len(set(ends)) == 3
    assert all(0 <= end < 1 for end in ends)


def chi_square(counts: np.ndarray) -> float:
    """The statistic against equal cells, in standard deviations of its distribution."""
    expected = counts.sum() / counts.size
    degrees = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees)


def test_uniform_is_uniform():
    u = uniform(11, 0, torch.arange(512)[:, None], torch.arange(512)).flatten().numpy()
    n = u.size
    assert u.min() >= 0
    assert u.max() < 1
    for power in (1, 2, 3):  # moments 1 / (p + 1), variance 1 / (2p + 1) - 1 / (p + 1)^2
        deviation = math.sqrt((1 / (2 * power + 1) - 1 / (power + 1) ** 2) / n)
        assert abs((u**power).mean() - 1 / (power + 1)) < 4 * deviation
    assert abs(chi_square(np.bincount((u * 256).astype(int), minlength=256))) < 4
    # The low bits too: the 20 below the top 20.
    low = np.floor(u * 2**40) % 2**20 / 2**20
    assert abs(chi_square(np.bincount((low * 256).astype(int), minlength=256))) < 4


@pytest.mark.parametrize("neighbour", ["position", "sample", "step", "seed"])
def test_neighbouring_keys_are_independent(neighbour):
    ids, positions = torch.arange(512)[:, None], torch.arange(512)
    shifted = {
        "position": (11, 0, ids, positions + 1),
        "sample": (11, 0, ids + 1, positions),
        "step": (11, 1, ids, positions),
        "seed": (12, 0, ids, positions),
    }
    a, b = (uniform(*key).flatten().numpy() for key in ((11, 0, ids, positions), shifted[neighbour]))
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(a.size)
    cells = (a * 16).astype(int) * 16 + (b * 16).astype(int)
    assert abs(chi_square(np.bincount(cells, minlength=256))) < 4


def logits_of(*probabilities: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=dtype).log()


def test_draw_inverts_the_cumulative_distribution():
    logits = logits_of(0.2, 0.0, 0.5, 0.3).expand(6, 4)
    uniforms = torch.tensor([0.0, 0.15, 0.2001, 0.45, 0.71, 1 - 2**-53], dtype=torch.float64)
    drawn = draw(logits, uniforms, 1.0)
    assert drawn.tokens.tolist() == [0, 0, 2, 2, 3, 3]
    expected = torch.tensor([0.2, 0.2, 0.5, 0.5, 0.3, 0.3], dtype=torch.float64).log()
    torch.testing.assert_close(drawn.logprobs, expected, rtol=0, atol=1e-12)
    # 0 and 1 border no other token: the first and the last draw are far from a change, not on a border.
    margins = torch.tensor([0.2, 0.05, 0.0001, 0.25, 0.01, 0.3], dtype=torch.float64)
    torch.testing.assert_close(drawn.margins, margins, rtol=0, atol=1e-12)


def test_temperature_divides_the_logits():
    # softmax(log [1, 4] / 2) = [1, 2] / 3
    drawn = draw(logits_of(1.0, 4.0).expand(2, 2), torch.tensor([0.3, 0.35], dtype=torch.float64), 2.0)
    assert drawn.tokens.tolist() == [0, 1]
    expected = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64).log()
    torch.testing.assert_close(drawn.logprobs, expected, rtol=0, atol=1e-12)


def test_temperature_0_takes_the_most_likely_and_reports_temperature_1():
    drawn = draw(logits_of(0.2, 0.5, 0.3)[None], None, 0)
    assert (drawn.tokens.item(), drawn.margins.item()) == (1, 1.0)
    assert drawn.logprobs.item() == pytest.approx(math.log(0.5), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_uniform_never_draws_an_impossible_token(dtype):
    """The rounded total is not 1: the draw must stay inside of it, and off the tokens of probability 0."""
    torch.manual_seed(0)
    logits = torch.randn(200, 1000).to(dtype)
    logits[:, -300:] = -torch.inf
    drawn = draw(logits, torch.full((200,), 1 - 2**-53, dtype=torch.float64), 0.7)
    assert (drawn.tokens == 699).all()
    assert drawn.logprobs.dtype == torch.float32
    assert drawn.logprobs.isfinite().all()
    assert (drawn.margins > 0).all()


def test_a_certain_token_has_margin_1():
    drawn = draw(logits_of(0.0, 1.0, 0.0)[None], torch.tensor([0.5], dtype=torch.float64), 1.0)
    assert (drawn.tokens.item(), drawn.margins.item(), drawn.logprobs.item()) == (1, 1.0, 0.0)


def test_uniform_0_never_draws_an_impossible_token():
    drawn = draw(logits_of(0.0, 0.0, 0.4, 0.6)[None], torch.tensor([0.0], dtype=torch.float64), 1.0)
    assert drawn.tokens.item() == 2


def test_draws_follow_the_distribution():
    probabilities = torch.tensor([0.05, 0.4, 0.0, 0.25, 0.3], dtype=torch.float64)
    n = 100_000
    uniforms = uniform(5, 0, torch.arange(n), torch.tensor([0]))
    counts = draw(probabilities.log().expand(n, 5), uniforms, 1.0).tokens.bincount(minlength=5)
    deviation = (n * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - n * probabilities).abs() <= 4 * deviation).all()


def test_a_move_of_less_than_the_margin_keeps_the_token():
    torch.manual_seed(1)
    logits = torch.randn(500, 20, dtype=torch.float64)
    uniforms = uniform(5, 0, torch.arange(500), torch.tensor([3]))
    drawn = draw(logits, uniforms, 1.0)
    for sign in (-1, 1):
        within = (uniforms + sign * 0.999 * drawn.margins).clamp(0, 1 - 2**-53)
        assert torch.equal(draw(logits, within, 1.0).tokens, drawn.tokens)
    beyond = [draw(logits, (uniforms + s * 1.001 * drawn.margins).clamp(0, 1 - 2**-53), 1.0).tokens for s in (-1, 1)]
    assert ((beyond[0] != drawn.tokens) | (beyond[1] != drawn.tokens)).all()


def test_replay_scores_the_given_tokens_like_a_draw():
    torch.manual_seed(2)
    logits = torch.randn(50, 20)
    drawn = draw(logits, uniform(5, 0, torch.arange(50), torch.tensor([0])), 0.8)
    replayed = replay(logits, drawn.tokens, 0.8)
    assert torch.equal(replayed.tokens, drawn.tokens)
    assert torch.equal(replayed.logprobs, drawn.logprobs)
    assert (replayed.margins == 1).all()


def test_top_k_keeps_the_most_likely_and_equals_of_the_last():
    logits = logits_of(0.1, 0.2, 0.4, 0.2, 0.1).expand(3, 5)
    uniforms = torch.tensor([0.0, 0.3, 1 - 2**-53], dtype=torch.float64)
    for k, tokens, expected in ((1, [2, 2, 2], [1.0] * 3), (2, [1, 2, 3], [0.25, 0.5, 0.25])):
        drawn = draw(logits, uniforms, 1.0, Truncation(top_k=k))
        assert drawn.tokens.tolist() == tokens
        assert drawn.logprobs.exp().tolist() == pytest.approx(expected)
    assert drawn.untruncated.exp().tolist() == pytest.approx([0.2, 0.4, 0.2])


def test_top_p_keeps_the_fewest_that_reach_it():
    logits = logits_of(0.1, 0.3, 0.4, 0.2)
    for p, kept in ((0.39, [2]), (0.41, [1, 2]), (0.69, [1, 2]), (0.71, [1, 2, 3]), (1.0, [0, 1, 2, 3])):
        grid = (torch.arange(64, dtype=torch.float64) + 0.5) / 64
        tokens = draw(logits.expand(64, 4), grid, 1.0, Truncation(top_p=p)).tokens
        assert tokens.unique().tolist() == kept


@pytest.mark.parametrize(
    ("p", "kept"),
    [
        (1e-9, [1]),  # one token at least
        (0.5, [1]),  # its probability reaches p, so no second one is needed
        (0.5000001, [0, 1]),  # of equals the first
        (0.75, [0, 1]),
        (0.7500001, [0, 1, 2]),
        (0.9999999, [0, 1, 2]),
    ],
)
def test_top_p_needs_no_token_more_than_reach_it(p: float, kept: list[int]) -> None:
    probabilities = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64)
    assert torch.equal(probabilities.log().exp(), probabilities), "borders are met exactly"
    found = Truncation(top_p=p)(probabilities.log())
    assert found.isfinite().nonzero()[:, 1].tolist() == kept
    renormalised = probabilities[0, kept] / probabilities[0, kept].sum()
    torch.testing.assert_close(found[0, kept].exp(), renormalised, rtol=1e-12, atol=0)


def test_of_equals_top_p_keeps_the_first_tokens() -> None:
    """Whatever a sort of another machine would put first: 1,000 equal tokens, of which half are enough."""
    kept = Truncation(top_p=0.4999)(torch.zeros(1, 1000).log_softmax(-1)).isfinite()[0]
    assert kept.nonzero().flatten().tolist() == list(range(500))


def test_top_p_is_of_what_top_k_has_left() -> None:
    logprobs = torch.tensor([[0.4, 0.2, 0.1, 0.3]], dtype=torch.float64).log()
    # Of the two most likely, 4/7 and 3/7 are left; 0.57 is reached by the first, 0.58 is not.
    for p, kept in ((0.57, [0]), (0.58, [0, 3])):
        assert Truncation(top_k=2, top_p=p)(logprobs).isfinite().nonzero()[:, 1].tolist() == kept


def test_a_forbidden_token_is_not_drawn_at_any_temperature():
    logits = logits_of(0.9, 0.06, 0.04).expand(2, 3)
    truncation = Truncation(forbidden=torch.tensor([0, -1]))
    uniforms = torch.full((2,), 0.5, dtype=torch.float64)
    drawn = draw(logits, uniforms, 1.0, truncation)
    assert drawn.tokens.tolist() == [1, 0]
    assert drawn.logprobs.exp().tolist() == pytest.approx([0.6, 0.9])
    assert drawn.untruncated.exp().tolist() == pytest.approx([0.06, 0.9])
    assert draw(logits, None, 0.0, truncation).tokens.tolist() == [1, 0]


def test_replay_of_a_token_that_is_left_out_has_probability_0():
    replayed = replay(logits_of(0.7, 0.3)[None], torch.tensor([1]), 1.0, Truncation(top_k=1))
    assert replayed.logprobs.tolist() == [-math.inf]
    assert replayed.untruncated.exp().tolist() == pytest.approx([0.3])


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"top_p": 0.5}, {"forbidden": torch.tensor([0, 0, 0])}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_no_distribution_has_no_probability_and_stays_in_the_vocabulary(temperature, settings, wrong):
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, wrong, 2.0], [-math.inf] * 3], dtype=torch.float64)
    drawn = draw(logits, torch.full((3,), 0.5, dtype=torch.float64), temperature, Truncation(**settings))
    assert drawn.untruncated.isnan().tolist() == [False, True, True]
    assert ((drawn.tokens >= 0) & (drawn.tokens < 3)).all()


def test_what_leaves_nothing_out_changes_nothing():
    logprobs = torch.randn(2, 4).log_softmax(-1)
    for truncation in (Truncation(), Truncation(top_k=4), Truncation(top_k=9), Truncation(top_p=1.0)):
        assert truncation(logprobs) is logprobs
        assert truncation.without_forbidden(logprobs) is logprobs
    assert Truncation(top_k=3)(logprobs).isinf().sum(1).tolist() == [1, 1]


def test_draws_without_truncation_are_made_by_one_kernel(monkeypatch):
    """Where it takes the logits: in float32 and bfloat16, at a temperature, with a number for each row."""
    asked = []

    def kernel(logits, uniforms, temperature, tokens=None):
        asked.append((uniforms is None, temperature, tokens))
        return torch.tensor([7]), torch.tensor([-1.0]), torch.tensor([0.25], dtype=torch.float64)

    monkeypatch.setattr(sampling.fused, "draw", kernel)
    logits, half = torch.zeros(1, 3), torch.tensor([0.5], dtype=torch.float64)
    drawn = draw(logits, half, 0.5)
    assert (drawn.tokens, drawn.logprobs, drawn.untruncated, drawn.margins) == (7, -1.0, -1.0, 0.25)
    given = torch.tensor([2])
    replayed = replay(logits, given, 2.0)
    assert (replayed.tokens, replayed.logprobs, replayed.untruncated, replayed.margins) == (2, -1.0, -1.0, 0.25)
    assert asked == [(False, 0.5, None), (True, 2.0, given)]
    for truncation in (Truncation(top_k=1), Truncation(top_p=0.9), Truncation(forbidden=torch.tensor([-1]))):
        draw(logits, half, 1.0, truncation)
        replay(logits, given, 1.0, truncation)
    for temperature in (0, 0.0):
        draw(logits, None, temperature)
        draw(logits, half, temperature)
        replay(logits, given, temperature)
    draw(logits.double(), half, 1.0)
    assert len(asked) == 2
    with pytest.raises(AssertionError, match="needs random numbers"):
        draw(logits, None, 1.0)


def test_replay_at_temperature_0_is_of_the_whole_distribution():
    logits = logits_of(0.7, 0.3)[None]
    replayed = replay(logits, torch.tensor([1]), 0.0, Truncation(top_k=1))
    assert replayed.logprobs.exp().tolist() == replayed.untruncated.exp().tolist() == pytest.approx([0.3])


def test_log_probabilities_are_in_float32_at_least():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
        assert tempered_logprobs(torch.zeros(1, 4, dtype=dtype), 0.5).dtype == expected
    logits = logits_of(1.0, 4.0)[None]
    for temperature, expected in ((0, [0.2, 0.8]), (1, [0.2, 0.8]), (0.5, [1 / 17, 16 / 17]), (2.0, [1 / 3, 2 / 3])):
        assert tempered_logprobs(logits, temperature).exp()[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("vocab", [5, 128, 300, 1187 * 128])
def test_a_search_by_blocks_finds_the_same_tokens(vocab):
    """Some tokens have no probability, whole blocks among them; the first and the last number are drawn too."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(64, vocab, generator=generator) * 3
    logits[torch.rand(64, vocab, generator=generator) < 0.4] = -torch.inf
    logits[:, -vocab // 3 :] = -torch.inf
    logits[:, 0] = 0.0
    uniforms = torch.rand(64, 1, generator=generator, dtype=torch.float64)
    uniforms[0], uniforms[1] = 0.0, 1 - 2**-53
    probabilities = logits.softmax(-1)
    tokens, margins = sampling._find_in_blocks(probabilities, uniforms)
    expected, expected_margins = sampling._find(probabilities, uniforms)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(margins, expected_margins, rtol=0, atol=1e-13)
    assert (probabilities.gather(-1, tokens[:, None]) > 0).all()
    assert sampling._find_in_blocks(probabilities[2:3], uniforms[2:3])[0] == expected[2], "a row alone"


def test_a_search_by_blocks_of_no_distribution_stays_in_the_vocabulary():
    tokens, _ = sampling._find_in_blocks(torch.full((1, 300), torch.nan), torch.tensor([[0.5]], dtype=torch.float64))
    assert 0 <= int(tokens) < 300


@pytest.mark.parametrize("truncation", [Truncation(), Truncation(top_p=0.9)])
def test_a_gpu_scans_no_row_alone(truncation):
    """torch's kernel for one row gives other bits from run to run. Nor is the whole vocabulary in float64, but in the
    truncation by `top_p`."""

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            made = operator(*args, **(kwargs or {}))
            if operator is torch.ops.aten.cumsum.default:
                scanned.append(tuple(args[0].shape))
            if isinstance(made, torch.Tensor) and made.dtype == torch.float64:
                wide.append(made.numel())
            return made

    scanned: list[tuple[int, int]] = []
    wide: list[int] = []
    with Operators():
        drawn = draw(
            torch.empty(1, 1280, device="meta"), torch.empty(1, dtype=torch.float64, device="meta"), 1.0, truncation
        )
    assert drawn.tokens.shape == drawn.margins.shape == (1,)
    assert scanned[-2:] == [(2, 10), (2, 128)]
    assert all(rows == 2 for rows, _ in scanned)
    assert (max(wide) < 1280) == truncation.keeps_all
