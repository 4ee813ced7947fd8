"""Log-probabilities in chunks against torch's on full logits: values, gradients, memory."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from realhf.cpu import fused
from realhf.parallel.gradients import give_on_use, let_add_to_grad
from realhf.parallel.tensor import VocabParallelEmbedding
from realhf.parallel.vocabulary import Logits

HIDDEN, VOCAB = 6, 11

of_any_tiles = given(
    rows=st.integers(1, 40),
    rows_a_chunk=st.integers(1, 50),
    temperature=st.sampled_from([1.0, 0.7]),
    with_entropy=st.booleans(),
)


def inputs(rows: int, dtype: torch.dtype = torch.float64, vocab: int = VOCAB) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, tokens, and a weight of every row in a loss."""
    generator = torch.Generator().manual_seed(rows)
    hidden, weight, in_loss = (torch.randn(s, generator=generator).to(dtype) for s in ((rows, 6), (vocab, 6), (rows,)))
    tokens = torch.randint(vocab, (rows,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), tokens, in_loss


@of_any_tiles
@settings(max_examples=60, deadline=None)
def test_equals_torch_on_full_logits(rows: int, rows_a_chunk: int, temperature: float, with_entropy: bool) -> None:
    hidden, weight, tokens, factor = inputs(rows)
    ours = Logits(hidden, weight, chunk_bytes=rows_a_chunk * VOCAB * 8).of_tokens(
        tokens, temperature, with_entropy=with_entropy
    )
    z = F.linear(hidden, weight) / temperature
    theirs = -F.cross_entropy(z, tokens, reduction="none")
    entropy = torch.distributions.Categorical(logits=z).entropy()
    torch.testing.assert_close(ours.logprob, theirs, rtol=1e-12, atol=1e-12)
    assert torch.equal(ours.is_top, z.argmax(-1) == tokens)
    loss, oracle = (ours.logprob * factor).sum(), (theirs * factor).sum()
    if with_entropy:
        torch.testing.assert_close(ours.entropy, entropy, rtol=1e-12, atol=1e-12)
        loss, oracle = loss + (ours.entropy * factor.flip(0)).sum(), oracle + (entropy * factor.flip(0)).sum()
    else:
        assert ours.entropy is None
    for mine, expected in zip(
        torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(oracle, (hidden, weight)), strict=True
    ):
        assert (mine - expected).norm() < 1e-12 * (1 + expected.norm())


@of_any_tiles
@settings(max_examples=60, deadline=None)
def test_the_kernels_of_one_thread_follow_float64(
    rows: int, rows_a_chunk: int, temperature: float, with_entropy: bool
) -> None:
    hidden, weight, tokens, factor = inputs(rows, torch.float32)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    results = []
    for given_hidden, given_weight in ((hidden, weight), wide):
        assert fused.trains(given_hidden, given_weight) == (given_hidden.dtype == torch.float32)
        head = Logits(given_hidden, given_weight, chunk_bytes=rows_a_chunk * VOCAB * given_hidden.itemsize)
        found = head.of_tokens(tokens, temperature, with_entropy=with_entropy)
        loss = (found.logprob * factor).sum()
        if found.entropy is not None:
            loss = loss + (found.entropy * factor.flip(0)).sum()
        results.append((found.logprob, *torch.autograd.grad(loss, (given_hidden, given_weight))))
    for mine, expected in zip(*results, strict=True):
        assert (mine.double() - expected).norm() < 2e-6 * (1 + expected.norm())


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """Memory that nothing has written yet is NaN, in place of whatever lay there before."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_row_in_the_loss_gives_gradients_of_zero(
    dtype: torch.dtype, slices: int, with_entropy: bool, nan_in_new_memory: None
) -> None:
    hidden, weight, tokens, _ = inputs(5, dtype)
    parts = [part.detach().requires_grad_() for part in weight.chunk(slices)]
    nowhere = torch.zeros(0, dtype=torch.int64)
    found = Logits(hidden, parts)[nowhere].of_tokens(tokens[nowhere], with_entropy=with_entropy)
    assert found.logprob.shape == found.is_top.shape == (0,)
    loss = found.logprob.sum() + (found.entropy.sum() if found.entropy is not None else 0.0)
    assert loss == 0.0
    for gradient, of in zip(torch.autograd.grad(loss, (hidden, *parts)), (hidden, *parts), strict=True):
        assert torch.equal(gradient, torch.zeros_like(of))


def test_bfloat16_takes_its_softmax_in_float32() -> None:
    hidden, weight, tokens, factor = inputs(50, torch.bfloat16)
    ours = Logits(hidden, weight, chunk_bytes=7 * VOCAB * 4).of_tokens(tokens)
    theirs = -F.cross_entropy(F.linear(hidden, weight).float(), tokens, reduction="none")
    assert ours.logprob.dtype == torch.float32
    torch.testing.assert_close(ours.logprob, theirs)
    mine, expected = (torch.autograd.grad((x * factor.float()).sum(), (hidden, weight)) for x in (ours.logprob, theirs))
    for a, b in zip(mine, expected, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a - b).norm() < 0.01 * b.norm()


def test_rows_are_selected_before_anything_is_computed() -> None:
    hidden, weight, tokens, _ = inputs(20)
    logits = Logits(hidden, weight)
    rows = torch.tensor([3, 19, 0])
    assert len(logits[rows]) == 3
    torch.testing.assert_close(logits[rows].full(), F.linear(hidden, weight)[rows])
    is_wanted = tokens > 4
    torch.testing.assert_close(
        logits[is_wanted].of_tokens(tokens[is_wanted]).logprob, logits.of_tokens(tokens).logprob[is_wanted]
    )
    assert logits[rows[:0]].of_tokens(tokens[:0]).logprob.shape == (0,)


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation gave back."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


@pytest.mark.parametrize("with_entropy", [False, True])
def test_memory_of_logits_is_independent_of_the_number_of_tokens(with_entropy: bool) -> None:
    largest = []
    for rows in (100, 400):
        hidden, weight, tokens, _ = inputs(rows, torch.float32, vocab=1000)
        with LargestTensor() as seen:
            result = Logits(hidden, weight, chunk_bytes=16 * 1000 * 4).of_tokens(tokens, with_entropy=with_entropy)
            (result.logprob + (result.entropy if with_entropy else 0.0)).sum().backward()
        largest.append(seen.elements)
    assert largest == [16 * 1000] * 2


@pytest.mark.parametrize("token", [-100, VOCAB, 10**9])
def test_a_label_outside_of_the_vocabulary_is_refused(token: int) -> None:
    hidden, weight, _, _ = inputs(3)
    with pytest.raises(ValueError, match=f"row 1 asks for the id {token}, and vocab_size={VOCAB} has ids from 0"):
        Logits(hidden, weight).of_tokens(torch.tensor([0, token, 1]))


def test_a_wide_vocabulary_is_read_once_and_its_gradient_written_once() -> None:
    """A tile is as many tokens high as a product needs, however wide the vocabulary."""
    hidden, weight, tokens, _ = inputs(400, torch.float32, vocab=5000)
    with Elements() as seen:
        Logits(hidden, weight, chunk_bytes=8 * 5000 * 4).of_tokens(tokens).logprob.sum().backward()
    # Twice the logits, and both products of the backward pass once: a pass over the weight for every 8 tokens would
    # give 50 gradients of it.
    of_weights = sum(shape.numel() for shape in seen.products if shape[-1] == HIDDEN and shape[0] != len(tokens))
    assert of_weights == weight.numel()
    assert torch.allclose(weight.grad, full_gradient(hidden, weight, tokens), rtol=1e-4, atol=1e-5)


class Elements(TorchDispatchMode):
    """Notes the shapes of what products give."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[torch.Size] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.mkldnn._linear_pointwise.default):
            self.products.append(result.shape)
        return result


def full_gradient(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    plain = weight.detach().clone().requires_grad_()
    (-F.cross_entropy(F.linear(hidden.detach(), plain), tokens, reduction="sum")).backward()
    return plain.grad


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float64])
def test_gradients_of_a_tied_weight_add_up_in_its_grad(grad_dtype: torch.dtype) -> None:
    """The head's and the embedding's, into memory that is there already, beside what it has."""
    _, weight, tokens, factor = inputs(30, torch.float32, vocab=50)
    embedding = VocabParallelEmbedding((50, HIDDEN), None)
    embedding.weight = torch.nn.Parameter(weight.detach().clone())
    embedding.weight.grad_dtype = grad_dtype
    embedding.weight.grad = grad = torch.ones(50, HIDDEN, dtype=grad_dtype)
    let_add_to_grad(embedding.weight)
    found = Logits(embedding(tokens), embedding.weight, chunk_bytes=640).of_tokens(tokens.flip(0)).logprob
    (found * factor).sum().backward()
    assert embedding.weight.grad is grad
    plain = weight.detach().double().requires_grad_()
    theirs = -F.cross_entropy(F.linear(F.embedding(tokens, plain), plain), tokens.flip(0), reduction="none")
    (theirs * factor.double()).sum().backward()
    torch.testing.assert_close(grad.double(), plain.grad + 1.0, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_weight_in_slices_gives_the_values_and_gradients_of_a_whole_one(with_entropy: bool) -> None:
    """Slices are used one after the other, the gradient of each goes where it is wanted, and only when it is there."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 8, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(12, 8, generator=generator, dtype=torch.float64).requires_grad_()
    factors, tokens = torch.randn(5, generator=generator, dtype=torch.float64), torch.tensor([0, 4, 5, 11, 7])
    seen: list[str] = []

    def gradients(logits: Logits) -> None:
        found = logits.of_tokens(tokens, 0.7, with_entropy=with_entropy)
        total = (found.logprob * factors).sum()
        (total + found.entropy.square().sum() if found.entropy is not None else total).backward()

    gradients(Logits(hidden, weight, chunk_bytes=3 * 5 * 8))
    expected_hidden, hidden.grad = hidden.grad, None
    slices = [part.detach().clone().requires_grad_() for part in weight.split([5, 1, 6])]
    sinks = [torch.zeros_like(part) for part in slices]
    for number, (part, sink) in enumerate(zip(slices, sinks, strict=True)):

        def use(number: int = number) -> None:
            seen.append(f"use {number}")

        def give(number: int = number, sink: torch.Tensor = sink) -> torch.Tensor:
            seen.append(f"gradient {number}")
            return sink

        give_on_use(part, use, give)
    logits = Logits(hidden, slices, chunk_bytes=3 * 5 * 8)
    gradients(logits)
    torch.testing.assert_close(hidden.grad, expected_hidden, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.cat(sinks), weight.grad, rtol=1e-12, atol=1e-14)
    assert all(part.grad is None for part in slices)
    forward, backward = (
        [f"use {n}" for n in range(3)],
        [f"{what} {n}" for n in (2, 1, 0) for what in ("use", "gradient")],
    )
    assert seen == forward + backward
    torch.testing.assert_close(logits.full(), hidden @ weight.T, rtol=1e-12, atol=1e-14)
