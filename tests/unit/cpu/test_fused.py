"""The fused kernels against the operators of torch that they replace, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from realhf.architecture.decoding import PAGE_TOKENS as PAGE
from realhf.cpu import fused
from realhf.cpu.huge_pages import empty_in_huge_pages
from realhf.engine.generate.paged_attention import CppKernels, DecodeRows, LayerPages
from realhf.engine.generate.sampling import draw, replay, tempered_logprobs, uniform
from realhf.models.rotary import rotate

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    assert fused.takes(torch.zeros(1)), "the C++ modules are not built"


def part_of_wider_rows(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers whose rows do not lie end to end."""
    return torch.randn(shape[0], 2 * torch.Size(shape[1:]).numel()).to(dtype)[:, : torch.Size(shape[1:]).numel()]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 16, 31, 32, 100])
def test_rms_norm(dtype, width):
    x, weight = part_of_wider_rows(5, width, dtype=dtype), torch.randn(width).to(dtype)
    wide = x.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    torch.testing.assert_close(fused.rms_norm(x, weight, 1e-5).double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 16, 47])
def test_gated_silu(dtype, width):
    gate, up = (part_of_wider_rows(6, width, dtype=dtype) for _ in range(2))
    gate[0], gate[1], gate[2] = 100.0, -100.0, 0.0
    expected = F.silu(gate.double()) * up.double()
    torch.testing.assert_close(fused.gated_silu(gate, up).double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [2, 32, 48, 128])
def test_rotation(dtype, head_dim):
    x = part_of_wider_rows(7, 3, head_dim, dtype=dtype).unflatten(-1, (3, head_dim))
    angles = torch.randn(7, 1, head_dim // 2).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = rotate(x.double(), cos.double(), sin.double())
    torch.testing.assert_close(rotate(x, cos, sin).double(), expected, rtol=0, atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab", [1, 16, 100])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_draws_are_those_of_float64(dtype, vocab, temperature):
    """The same logits in float64 take the operators; a draw may differ only where its margin is that of rounding."""
    logits, uniforms = (4 * torch.randn(500, vocab)).to(dtype), uniform(3, 0, torch.arange(500), torch.tensor([0]))
    logits[:, vocab // 2 + 1 :: 7] = -torch.inf
    drawn, expected = draw(logits, uniforms, temperature), draw(logits.double(), uniforms, temperature)
    is_same = drawn.tokens == expected.tokens
    assert (expected.margins[~is_same] < 1e-6).all()
    assert is_same.sum() > 490
    for name, tolerance in (("logprobs", 1e-5), ("untruncated", 1e-5), ("margins", 1e-6)):
        found, wanted = (getattr(x, name)[is_same].double() for x in (drawn, expected))
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)
    assert torch.equal(replay(logits, drawn.tokens, temperature).logprobs, drawn.logprobs)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_statistics_of_the_vocabulary(dtype):
    logits, tokens, out = (9 * torch.randn(40, 77)).to(dtype), torch.randint(77, (40,)), torch.empty(4, 50)[:, 5:45]
    logits[:, 5] = -torch.inf
    fused.vocabulary_statistics(logits, tokens, 0.5, out)
    z = logits.double() / 0.5
    mean = (z.softmax(-1) * z.masked_fill(z == -torch.inf, 0.0)).sum(-1)
    torch.testing.assert_close(out[3].double(), mean, rtol=1e-5, atol=1e-5)
    out = out[:3]
    expected = torch.stack([z.logsumexp(-1), z.amax(-1), z.gather(-1, tokens[:, None])[:, 0]])
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(
        (out[2] - out[0]).exp() > 0.5, tempered_logprobs(z, 1).gather(-1, tokens[:, None])[:, 0].exp() > 0.5
    )


def gradients(out: torch.Tensor, grad: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Of `inputs`, in float64."""
    return [found.double() for found in torch.autograd.grad(out, inputs, grad.to(out.dtype))]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 16, 31, 100])
def test_gradients_of_rms_norm(dtype, width):
    x, grad = (part_of_wider_rows(5, width, dtype=dtype) for _ in range(2))
    x, weight = x.requires_grad_(), torch.randn(width).to(dtype).requires_grad_()
    found = gradients(fused.NormalisedByRMS.apply(x, weight, 1e-5), grad, x, weight)
    wide_x, wide_weight = (each.detach().double().requires_grad_() for each in (x, weight))
    out = wide_x * (wide_x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * wide_weight
    for mine, theirs in zip(found, gradients(out, grad, wide_x, wide_weight), strict=True):
        assert (mine - theirs).norm() < TOLERANCE[dtype] * (theirs.norm() + 1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 16, 47])
def test_gradients_of_gated_silu(dtype, width):
    gate, up, grad = (part_of_wider_rows(6, width, dtype=dtype) for _ in range(3))
    gate[0], gate[1], gate[2] = 100.0, -100.0, 0.0
    gate, up = gate.requires_grad_(), up.requires_grad_()
    found = gradients(fused.GatedSilu.apply(gate, up), grad, gate, up)
    wide = [each.detach().double().requires_grad_() for each in (gate, up)]
    for mine, theirs in zip(found, gradients(F.silu(wide[0]) * wide[1], grad, *wide), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab", [1, 16, 100])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradients_of_the_vocabulary(dtype, vocab, temperature, with_entropy):
    """Tokens of the first rows lie in another part of the vocabulary; an impossible token changes nothing."""
    z, tokens = (3 * torch.randn(50, vocab)).to(dtype), torch.randint(vocab, (50,))
    z[:, 1::9] = -torch.inf
    tokens[tokens % 9 == 1] = 0
    grad, grad_entropy = torch.randn(2, 50)
    at_token = grad.clone()
    at_token[:5] = 0
    wide = z.double().requires_grad_()
    logprobs = torch.log_softmax(wide / temperature, -1)
    entropy = -(logprobs.exp() * logprobs.masked_fill(z == -torch.inf, 0.0)).sum(-1)
    found = fused.logprob_gradient(
        z, tokens, temperature, (z.float() / temperature).logsumexp(-1), grad, at_token,
        (entropy.detach().float(), grad_entropy) if with_entropy else None,
    )  # fmt: skip
    loss = (logprobs.gather(-1, tokens[:, None])[5:, 0] * grad[5:]).sum()
    loss = loss + ((entropy * grad_entropy).sum() if with_entropy else 0.0)
    (expected,) = torch.autograd.grad(loss, wide)
    expected[:5] -= logprobs[:5].exp().detach() * grad[:5, None] / temperature
    expected = expected.masked_fill(z == -torch.inf, 0.0)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=2 * TOLERANCE[dtype], atol=20 * TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("count", [0, 1, 16, 47, 5000])
def test_square_sum_in_float64(dtype, count):
    x = torch.randn(count).to(dtype)
    assert fused.square_sum(x) == pytest.approx(x.double().square().sum().item(), rel=1e-14)


def test_training_takes_the_kernels_with_one_thread_alone():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert fused.trains(torch.zeros(2, requires_grad=True), torch.zeros(2))
        assert not fused.trains(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
        torch.set_num_threads(2)
        assert not fused.trains(torch.zeros(2))
    finally:
        torch.set_num_threads(threads)


def test_gradients_and_other_dtypes_are_left_to_torch():
    x = torch.zeros(2, 2)
    assert not fused.takes(x, x.clone().requires_grad_(True))
    assert not fused.takes(x, x.double())
    assert not fused.takes(x.half())
    with torch.no_grad():
        assert fused.takes(x.clone().requires_grad_(True))


def test_memory_in_huge_pages_is_memory():
    large = empty_in_huge_pages((3, 1 << 20), torch.bfloat16)
    large.fill_(2.0)
    assert large.shape == (3, 1 << 20)
    assert large.float().sum().item() == 6 << 20
    assert empty_in_huge_pages((0, 7), torch.float32).shape == (0, 7)


@pytest.mark.parametrize("token", [-1, 40, 10**9])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_token_outside_of_the_vocabulary_is_an_error_and_not_read(dtype, token):
    logits, tokens = torch.randn(3, 40).to(dtype), torch.tensor([0, 39, token])
    with pytest.raises(IndexError, match=f"token {token} of row 2 is not from 0 to 39"):
        fused.draw(logits, None, 1.0, tokens)
    with pytest.raises(IndexError, match=f"token {token} of row 2 is not from 0 to 39"):
        fused.vocabulary_statistics(logits, tokens, 1.0, torch.empty(3, 3))


@pytest.mark.parametrize("number", [math.nan, -0.1, 1.0])
def test_a_random_number_outside_of_its_range_is_an_error(number):
    with pytest.raises(ValueError, match="the random number of row 1 is "):
        fused.draw(torch.randn(2, 40), torch.tensor([0.5, number], dtype=torch.float64), 1.0)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_logits_that_are_no_distribution_have_a_token_of_the_vocabulary_and_no_probability(dtype, wrong):
    logits = torch.randn(3, 40)
    logits[1, 17] = wrong
    logits[2] = -math.inf
    uniforms = uniform(0, 0, torch.arange(3), torch.arange(3))
    tokens, logprobs, _ = fused.draw(logits.to(dtype), uniforms, 1.0)
    assert logprobs.isnan().tolist() == [False, True, True]
    assert (tokens >= 0).all()
    assert (tokens < 40).all()
    assert fused.draw(logits.to(dtype), None, 1.0, tokens)[1].isnan().tolist() == [False, True, True]


def test_pages_outside_of_the_cache_are_an_error_and_not_read():
    kernels, pages = CppKernels(), LayerPages(*cache_of(pages=3))
    key = torch.randn(2, 1, 8)
    for place in (-1, 3 * PAGE, 10**12):
        with pytest.raises(
            IndexError, match=rf"the place of token 1 is {place}, which is not from 0 to {3 * PAGE - 1}"
        ):
            kernels.write(pages, torch.tensor([0, place]), key, key)
    for table, lengths, says in (
        ([[0, 0], [1, 3]], [0, PAGE], "a page of sequence 1 is 3, which is not from 0 to 2"),
        ([[0, 0], [-1, 0]], [0, 0], "a page of sequence 1 is -1"),
        ([[0, 0], [1, 2]], [0, 2 * PAGE], f"the length of sequence 1 is {2 * PAGE}, which is not from 0 to"),
        ([[0, 0], [1, 2]], [0, -1], "the length of sequence 1 is -1"),
    ):
        rows = DecodeRows(torch.tensor(table, dtype=torch.int32), torch.tensor(lengths))
        with pytest.raises(IndexError, match=says):
            kernels.attend(pages, rows, key, key, key, None)


def cache_of(pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    key_shape, value_shape = CppKernels().page_shapes(1, 8)
    return torch.zeros(pages, *key_shape), torch.zeros(pages, *value_shape)
