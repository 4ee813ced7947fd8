"""The divergence in chunks against TRL's GKD loss on full logits: values, gradients, memory."""

import os

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realhf.parallel.divergence import Target, generalised_jsd
from realhf.parallel.vocabulary import Logits, WholeLogits
from tests.unit.parallel.test_vocabulary import VOCAB, LargestTensor, inputs

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from trl.experimental.gkd.gkd_trainer import GKDTrainer

BETAS = [0.0, 0.1, 0.5, 1.0]
TOP_K = 3


def target_of(rows: int, vocab: int = VOCAB, dtype: torch.dtype = torch.float64) -> Tensor:
    """Log-probabilities [rows, vocab] of a teacher."""
    generator = torch.Generator().manual_seed(rows + 1)
    return (2 * torch.randn(rows, vocab, generator=generator)).to(dtype).log_softmax(-1)


def of_top(logprob: Tensor) -> Target:
    """The same of the most likely tokens alone."""
    best, tokens = logprob.topk(TOP_K)
    return Target(torch.cat([best, (1 - best.exp().sum(-1, keepdim=True)).log()], dim=-1), tokens)


def outcomes(logprob: Tensor, target: Target) -> Tensor:
    """[rows, k + 1]: of the target's tokens, and of all others together."""
    assert target.tokens is not None
    named = logprob.gather(1, target.tokens)
    return torch.cat([named, (1 - named.exp().sum(-1, keepdim=True)).log()], dim=-1)


def trl_loss(student: Tensor, teacher: Tensor, beta: float, temperature: float = 1.0) -> Tensor:
    """By row."""
    found: Tensor = GKDTrainer.generalized_jsd_loss(
        student, teacher, beta=beta, temperature=temperature, reduction="none"
    )
    return found.sum(-1)


def by_tiles(logits: Logits | WholeLogits, target: Target, beta: float, temperature: float = 1.0) -> Tensor:
    nowhere = torch.zeros(len(logits), dtype=torch.int64)
    return generalised_jsd(logits, logits.of_tokens(nowhere, temperature).logsumexp, target, beta, temperature)


def check(found: Tensor, expected: Tensor, factor: Tensor, leaves: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    mine, theirs = (torch.autograd.grad((x * factor).sum(), leaves, retain_graph=True) for x in (found, expected))
    for a, b in zip(mine, theirs, strict=True):
        assert b.norm() > 1e-3
        assert (a - b).norm() < 1e-9 * b.norm()


@given(
    rows=st.integers(1, 40),
    rows_a_chunk=st.integers(1, 50),
    temperature=st.sampled_from([1.0, 0.7]),
    beta=st.sampled_from(BETAS),
)
@settings(max_examples=60, deadline=None)
def test_equals_trl_on_full_logits(rows: int, rows_a_chunk: int, temperature: float, beta: float) -> None:
    hidden, weight, _, factor = inputs(rows)
    teacher = target_of(rows)
    student = F.linear(hidden, weight)
    expected = trl_loss(student, teacher * temperature, beta, temperature)
    chunked = Logits(hidden, weight, chunk_bytes=rows_a_chunk * VOCAB * 8)
    check(by_tiles(chunked, Target(teacher), beta, temperature), expected, factor, (hidden, weight))
    whole = by_tiles(WholeLogits(student), Target(teacher), beta, temperature)
    check(whole, expected, factor, (hidden, weight))


@given(rows=st.integers(1, 40), rows_a_chunk=st.integers(1, 50), beta=st.sampled_from(BETAS))
@settings(max_examples=60, deadline=None)
def test_of_a_few_tokens_it_compares_them_and_all_others_together(rows: int, rows_a_chunk: int, beta: float) -> None:
    hidden, weight, _, factor = inputs(rows)
    target = of_top(target_of(rows))
    student = F.linear(hidden, weight)
    expected = trl_loss(outcomes(student.log_softmax(-1), target), target.logprob, beta)
    chunked = Logits(hidden, weight, chunk_bytes=rows_a_chunk * VOCAB * 8)
    check(by_tiles(chunked, target, beta), expected, factor, (hidden, weight))
    check(by_tiles(WholeLogits(student), target, beta), expected, factor, (hidden, weight))
    assert (expected <= trl_loss(student, target_of(rows), beta) + 1e-12).all()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("in_part", [False, True])
def test_slices_of_the_weight_are_used_one_after_the_other(beta: float, in_part: bool) -> None:
    hidden, weight, _, factor = inputs(9)
    target = of_top(target_of(9)) if in_part else Target(target_of(9))
    parts = [part.detach().requires_grad_() for part in weight.split([4, 4, 3])]
    results = []
    for slices in ([weight], parts):
        found = by_tiles(Logits(hidden, slices, chunk_bytes=16 * 8), target, beta)
        of_hidden, *of_slices = torch.autograd.grad((found * factor).sum(), (hidden, *slices))
        results.append((found, of_hidden, torch.cat(of_slices)))
    for one, cut in zip(*results, strict=True):
        torch.testing.assert_close(one, cut, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("in_part", [False, True])
def test_a_student_that_is_its_teacher_has_no_divergence_and_no_gradient(beta: float, in_part: bool) -> None:
    hidden, weight, _, _ = inputs(12)
    itself = F.linear(hidden, weight).log_softmax(-1).detach()
    found = by_tiles(Logits(hidden, weight), of_top(itself) if in_part else Target(itself), beta)
    assert found.abs().max() < 1e-12
    assert all(x.abs().max() < 1e-12 for x in torch.autograd.grad(found.sum(), (hidden, weight)))


@pytest.mark.parametrize("beta", BETAS)
def test_extreme_distributions_stay_finite(beta: float) -> None:
    """A student that is sure of what its teacher excludes, in float32."""
    hidden = torch.eye(3).mul(300).requires_grad_()
    weight = torch.eye(VOCAB)[:, :3].clone().requires_grad_()
    teacher = (300 * torch.eye(VOCAB)[[5, 6, 7]]).log_softmax(-1)
    for target in (Target(teacher), Target(torch.cat([teacher.topk(2)[0], teacher[:, :1]], -1), teacher.topk(2)[1])):
        found = by_tiles(Logits(hidden, weight), target, beta)
        gradients = torch.autograd.grad(found.sum(), (hidden, weight))
        assert all(x.isfinite().all() for x in (found, *gradients))
        assert found.min() > 0.3


def test_no_row_has_no_divergence() -> None:
    hidden, weight, tokens, _ = inputs(5)
    nowhere = tokens[:0]
    found = by_tiles(Logits(hidden, weight)[nowhere], Target(target_of(5)[:0]), 0.5)
    assert found.shape == (0,)
    for gradient, of in zip(torch.autograd.grad(found.sum(), (hidden, weight)), (hidden, weight), strict=True):
        assert torch.equal(gradient, torch.zeros_like(of))


def test_bfloat16_is_compared_in_float32() -> None:
    hidden, weight, _, factor = inputs(50, torch.bfloat16)
    teacher = target_of(50, dtype=torch.float32)
    found = by_tiles(Logits(hidden, weight, chunk_bytes=7 * VOCAB * 4), Target(teacher), 0.5)
    expected = trl_loss(F.linear(hidden, weight).float(), teacher, 0.5)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    mine, theirs = (torch.autograd.grad((x * factor).sum(), (hidden, weight)) for x in (found, expected))
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.float() - b.float()).norm() < 0.02 * b.float().norm()


@pytest.mark.parametrize("in_part", [False, True])
def test_no_operation_makes_all_logits(in_part: bool) -> None:
    rows, vocab = 400, 1000
    hidden, weight, _, _ = inputs(rows, torch.float32, vocab=vocab)
    teacher = target_of(rows, vocab, torch.float32)
    target = of_top(teacher) if in_part else Target(teacher)
    with LargestTensor() as largest:
        found = by_tiles(Logits(hidden, weight, chunk_bytes=40_000), target, 0.5)
        found.sum().backward()
    assert largest.elements < rows * vocab / 10
