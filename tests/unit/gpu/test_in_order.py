"""Models on the kernels of GPUs, in Triton's interpreter: the bits of a token depend on its sequence alone."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from realhf.api.generation import GenerationOptions
from realhf.architecture.compute import Computation
from realhf.architecture.model import DecoderConfig, Experts
from realhf.base.errors import UserError
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.generate.decode_graphs import DecodeWorkspace
from realhf.engine.generate.loop import generate
from realhf.engine.generate.sampling import Truncation, draw, replay
from realhf.engine.interface import GenerationRequest
from realhf.engine.model import ShardedModel
from realhf.gpu import packed_attention
from realhf.models import ordered_layers
from realhf.models.attention import PackedAttention
from realhf.models.attention_kernels import Lack
from realhf.models.ordered_layers import check_kernels
from realhf.parallel.ordered import column_sums
from realhf.parallel.vocabulary import Logits
from tests.unit.engine.captures import EagerCapture
from tests.unit.engine.losses import ONE_RANK
from tests.unit.gpu.in_order import as_on_gpu, in_whole_vectors
from tests.unit.gpu.test_paged_attention import plain
from tests.unit.models.flash import IN_INTERPRETER, WITH_TRITON

pytestmark = IN_INTERPRETER

MODELS = {
    "gated": (in_whole_vectors(qkv_bias=True, qk_norm=True), torch.bfloat16),
    "plain, LayerNorm, window": (
        in_whole_vectors(norm="layer", mlp="plain", activation="gelu", mlp_bias=True, sliding_window=4), torch.float32,
    ),
    "1 + weight, tied": (in_whole_vectors(norm="rms_plus_one", tied_embeddings=True), torch.float32),
}  # fmt: skip


def logprobs(output: Logits, batch: Batch) -> dict[str, list[Tensor]]:
    """Of the next token at each token; the last one's is of no use."""
    tokens = batch.data["tokens"]
    found = output.of_tokens(torch.cat([each.roll(-1) for each in tokens]), 1.2, with_entropy=True)
    lengths = [len(each) for each in tokens]
    return {"logprob": list(found.logprob.split(lengths)), "entropy": list(found.entropy.split(lengths))}


class Sums(TorchDispatchMode):
    """Counts the kernels of torch, whose order of a sum may depend on shapes. Sums in float64 have no rounding here."""

    KERNELS = (
        "sum", "mean", "var", "logsumexp", "_log_softmax", "_softmax", "native_layer_norm", "cumsum", "mm", "addmm",
        "bmm", "index_add", "index_add_", "embedding_dense_backward", "linear", "matmul", "log_softmax", "softmax",
        "layer_norm", "scaled_dot_product_attention",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, made = function.__name__.split(".")[0], function(*args, **(kwargs or {}))
        first = made[0] if isinstance(made, tuple) else made
        if name in self.KERNELS and first.dtype in (torch.float32, torch.bfloat16):
            self.seen[name] += 1
        return made


@pytest.mark.parametrize(
    ("config", "dtype"),
    [pytest.param(*of, id=name, marks=() if name == "gated" else pytest.mark.slow) for name, of in MODELS.items()],
)
def test_log_probabilities_of_rollouts_are_those_of_forward_passes(config: DecoderConfig, dtype: torch.dtype) -> None:
    """However many run at once, padded as for graphs, and in any micro-batch."""
    with as_on_gpu():
        model = ShardedModel(ModelSpec(config, ONE_RANK, dtype, compute=Computation(reproducible="layout")))
        model.initialise(seed=0)
        model.parameters.flat.mul_(6)
        generator = torch.Generator().manual_seed(1)
        prompts = [torch.randint(3, 96, (length,), generator=generator) for length in (1, 2, 9)]
        options = GenerationOptions(max_new_tokens=3, eos_token=-1, temperature=1.2)
        batch = Batch((0, 1, 2), {"prompt": prompts})
        request = GenerationRequest(options, sample_key=(1, 0), micro_batches=1)
        made, _ = generate(model.decoder, batch, request, DecodeWorkspace(EagerCapture()))
        with Sums() as sums:
            alone = model.generate(batch.select([2]), request)
        assert torch.equal(alone.sequences[0], made.sequences[2])
        assert torch.equal(alone.logprobs[0], made.logprobs[2])
        rollouts = Batch((0, 1, 2), {"tokens": made.sequences})
        with sums:
            one = model.forward(rollouts, "tokens", logprobs, 1)
        assert not sums.seen
        two = model.forward(rollouts, "tokens", logprobs, 2)
        for sample in range(3):
            assert torch.equal(one["logprob"][sample][-4:-1], made.logprobs[sample])
            for key in one:
                assert torch.equal(one[key][sample], two[key][sample])


@pytest.mark.parametrize("window", [None, 5])
def test_packed_sequences_attend_as_in_float64(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward in several launches, and the gradients of plain attention."""
    torch.manual_seed(0)
    monkeypatch.setattr(packed_attention, "_PARTS_BYTES", 4 * 4 * 16 * 7)  # 7 rows at once
    lengths = [3, 18, 1]
    query, key, value = (torch.randn(22, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    wide = [x.detach().double().requires_grad_() for x in (query, key, value)]
    with as_on_gpu():
        attend = PackedAttention(lengths, in_order=True)
        out = attend(0, query, key, value, window)
        alone = PackedAttention([18], in_order=True)(0, *(x[3:21] for x in (query, key, value)), window)
    assert torch.equal(alone, out[3:21])
    rows = []
    for q, k, v in zip(*(x.split(lengths) for x in wide), strict=True):
        rows += [plain(q[i], k[: i + 1], v[: i + 1], window) for i in range(len(q))]
    expected = torch.stack(rows)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
    weights = torch.randn(out.shape)
    ours = torch.autograd.grad(out, [query, key, value], weights)
    for one, other in zip(ours, torch.autograd.grad(expected, wide, weights.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5)


def test_gradients_of_attention_are_those_of_a_key_head_alone() -> None:
    """As many heads as a rank has."""
    torch.manual_seed(1)
    query, key, value = (torch.randn(9, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    weights = torch.randn(9, 4, 16)
    calls = []
    with as_on_gpu() as patch:
        by_length = PackedAttention._by_length
        patch.setattr(
            PackedAttention,
            "_by_length",
            lambda *given, **more: calls.append(given[2].shape) or by_length(*given, **more),
        )
        attend = PackedAttention([4, 5], in_order=True)
        whole = torch.autograd.grad(attend(0, query, key, value), [query, key, value], weights)
        half = [query[:, 2:], key[:, 1:], value[:, 1:]]
        of_half = torch.autograd.grad(attend(0, *half), half, weights[:, 2:])
    assert calls == [(9, 1, 16)] * 3
    for one, other in zip(whole, of_half, strict=True):
        assert torch.equal(one[:, one.shape[1] // 2 :], other)


@pytest.mark.parametrize("truncation", [{}, {"top_k": 9}, {"top_p": 0.7}, {"forbidden": 5}])
def test_draws_do_not_depend_on_the_rows_beside(truncation: dict[str, float]) -> None:
    """And are those of a CPU up to rounding."""
    torch.manual_seed(2)
    logits, uniforms = torch.randn(12, 128) * 2, torch.rand(12, dtype=torch.float64)
    forbidden = torch.full((12,), truncation["forbidden"]) if "forbidden" in truncation else None
    options = truncation | {"forbidden": forbidden}
    plainly = draw(logits, uniforms, 0.8, Truncation(**options))
    with as_on_gpu():
        drawn = draw(logits, uniforms, 0.8, Truncation(**options, in_order=True))
        own = Truncation(**options | {"forbidden": None if forbidden is None else forbidden[3:4]}, in_order=True)
        alone = draw(logits[3:4], uniforms[3:4], 0.8, own)
        again = replay(logits, drawn.tokens, 0.8, Truncation(**options, in_order=True))
    assert torch.equal(drawn.tokens, plainly.tokens)
    torch.testing.assert_close(drawn.margins, plainly.margins, rtol=0, atol=1e-6)
    for field in ("tokens", "logprobs", "untruncated", "margins"):
        assert torch.equal(getattr(alone, field), getattr(drawn, field)[3:4])
    assert torch.equal(again.logprobs, drawn.logprobs)
    assert (drawn.logprobs is drawn.untruncated) == (not truncation), "then they are those of the training's pass"


def test_gpus_without_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config, experts = in_whole_vectors(), Experts(count=4, per_token=2)
    lack = Lack("triton", "is not installed", "pip install triton")
    without = replace(WITH_TRITON, triton=None, lacks=(lack,))
    for here, wrong, words in (
        (WITH_TRITON, replace(config, experts=experts), r"on cuda:1: experts=4 have no kernels .* or run on a CPU"),
        (WITH_TRITON, replace(config, attention_head_dim=320), r"no kernel takes heads of 320 numbers, but"),
        (without, config, r"no kernels in bfloat16, as Triton is not installed \(pip install triton\); leave re"),
    ):
        monkeypatch.setattr(ordered_layers, "machine", lambda device, here=here: here)
        monkeypatch.setattr(ordered_layers, "check_in_order", lambda threads: None)
        check_kernels(wrong, torch.bfloat16, "cpu")
        with pytest.raises(UserError, match=words):
            check_kernels(wrong, torch.bfloat16, "cuda:1")
        compute = Computation(reproducible="layout")
        with pytest.raises(UserError, match=words):
            ShardedModel(ModelSpec(wrong, ONE_RANK, torch.bfloat16, torch.device("cuda:1"), compute=compute))
    monkeypatch.setattr(ordered_layers, "machine", lambda device: WITH_TRITON)
    check_kernels(config, torch.float32, "cuda")


def test_gradients_of_biases_are_sums_of_columns_alone() -> None:
    torch.manual_seed(4)
    x = torch.randn(70, 40)
    with as_on_gpu(), Sums() as sums:
        found = column_sums(x)
        assert torch.equal(column_sums(x[:, 8:20]), found[8:20])
    assert not sums.seen
    torch.testing.assert_close(found, x.sum(0), rtol=0, atol=2e-5)


def test_sums_of_probabilities_have_no_rounding() -> None:
    torch.manual_seed(3)
    terms = Truncation(in_order=True).terms(torch.randn(4, 50_000).softmax(-1))
    assert torch.equal(terms.sum(-1), terms.flip(-1).cumsum(-1)[:, -1])
    assert torch.equal(terms.sum(-1), terms.view(4, 500, 100).sum(1).sum(-1))
