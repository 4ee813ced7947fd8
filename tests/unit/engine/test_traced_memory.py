"""The planner's bytes of a training on a GPU against a trace of the engine on `meta`, which counts each tensor.

Kernels of CUDA that have memory of their own beside tensors (cuBLAS, sorting) are not in the trace.
"""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.lib.peak_memory import PeakMemory
from realhf.api.experiment import OptimizerConfig
from realhf.architecture.compute import Computation, Recomputation
from realhf.architecture.model import DecoderConfig
from realhf.architecture.named import ARCHITECTURES
from realhf.dataflow.graph import TRAIN_STEP, ModelFunctionCallDef
from realhf.dataflow.interface import InterfaceConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.forward import run_stage
from realhf.engine.model import ShardedModel
from realhf.engine.packing import pack_micro_batch
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.models import attention
from realhf.parallel.groups import GroupTable
from realhf.parallel.sequence import TokenShards
from realhf.parallel.vocabulary import Logits
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.features import ENGINE
from realhf.planning.model.memory import PlacedModel
from realhf.planning.model.rank_work import RankWork
from realhf.planning.model.workload import Workload
from tests.unit.engine.fake_ranks import as_rank
from tests.unit.models.flash import HOPPER

H100 = load_hardware("h100")
MOST = 1.05  # times the trace
SMALL, LARGE = ARCHITECTURES["qwen2.5-1.5b"], ARCHITECTURES["llama2-7b"]
MODELS = {"1.5b": SMALL, "7b": LARGE}
SHORT = {name: replace(model, num_layers=4) for name, model in MODELS.items()}
FAMILIES = {
    "gemma": replace(
        SMALL, num_layers=3, norm="rms_plus_one", activation="gelu_tanh", vocab_size=256000, attention_head_dim=256,
        num_heads=8, num_kv_heads=2,
    ),
    "gpt2": replace(
        SMALL, num_layers=3, norm="layer", mlp="plain", mlp_bias=True, positions="learned", max_positions=2048,
        num_kv_heads=12, vocab_size=32000,
    ),
    "qwen3": replace(ARCHITECTURES["qwen3-0.6b"], num_layers=3),
    "critic": replace(SMALL, num_layers=3, vocab_size=32000).with_head("scalar"),
}  # fmt: skip

RECOMPUTATIONS = pytest.mark.parametrize("recomputation", ["off", "selective", "full"])


@torch.library.custom_op("flash_attn::traced_forward", mutates_args=())
def traced_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """In flash-attn's namespace, so that selective recomputation keeps its results."""
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


traced_forward.register_fake(traced_forward._init_fn)


class TracedAttention(torch.autograd.Function):
    """The tensors of flash-attn 2's `mha_varlen_fwd` and `mha_varlen_bwd`, deterministic, on an H100; no values."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sequences: int) -> Tensor:
        out, softmax_lse = traced_forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, softmax_lse)
        ctx.sequences = sequences
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        (tokens, heads, width), rows = q.shape, len(q) + 128 * ctx.sequences
        rounded, splits = -(-width // 32) * 32, -(-132 // (ctx.sequences * heads))
        beside = [
            q.new_empty(heads, rows, dtype=torch.float32),  # softmax_d
            q.new_empty(splits, rows, heads, rounded, dtype=torch.float32),  # dq_accum
        ]
        if heads != k.shape[1]:
            beside += [q.new_empty(tokens, heads, width) for _ in "kv"]  # dk_expanded, dv_expanded
        return dq, dk, dv, None


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes flash-attn, whose tensors are traced; tokens on `meta` have no values to check."""

    def varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *_: Any, **options: Any) -> Tensor:
        assert options["deterministic"]
        out: Tensor = TracedAttention.apply(q, k, v, len(cu_seqlens) - 1)
        return out

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = varlen  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(attention, "machine", lambda _: replace(HOPPER, flash_attn=(2, 8)))
    monkeypatch.setattr(Logits, "_check", lambda *_: None)


Lengths = tuple[int, int, int]  # samples, tokens of a prompt, tokens of a response (0: all are trained on)


def traced_bytes(config: DecoderConfig, lengths: Lengths, compute: Computation, tp: int) -> int:
    """The most of a micro-batch's forward and backward pass, beside parameters, gradients and states."""
    samples, prompt, response = lengths
    layout, device = Layout(DeviceMesh(0, tp), ParallelStrategy(tp=tp)), torch.device("meta")
    with as_rank(0, tp):
        groups = GroupTable([layout], 0).groups(layout)
        spec = ModelSpec(config, groups, torch.bfloat16, device, optimizer=OptimizerConfig(), compute=compute)
        model = ShardedModel(spec)
        with PeakMemory() as memory:
            packed = pack_micro_batch([torch.zeros(prompt + response, dtype=torch.int64)] * samples, device)
            group = groups.tensor if compute.sequence_parallel else None
            shards = None if group is None else TokenShards(group, len(packed.tokens))
            output = run_stage(model.decoder, packed, None, shards, compute.recomputed)
            loss = loss_of(output, samples * (response or prompt))
            del output
            loss.backward()
    return memory.peak_bytes


def loss_of(output: Tensor | Logits, trained: int) -> Tensor:
    """Of as many tokens; its own tensors are few numbers a token."""
    if isinstance(output, Tensor):
        return output.float().sum()
    tokens = torch.zeros(trained, dtype=torch.int64, device="meta")
    return -output[tokens].of_tokens(tokens).logprob.sum()


def planned_bytes(config: DecoderConfig, lengths: Lengths, compute: Computation, tp: int) -> float:
    samples, prompt, response = lengths
    call = ModelFunctionCallDef(
        model_name="m", model_type=config, interface_type=TRAIN_STEP, interface_impl=InterfaceConfig(), input_data=["x"]
    )
    placed = PlacedModel(config, ParallelStrategy(tp=tp), "bfloat16", ENGINE.on(H100).under(compute))
    workload = Workload(prompt_tokens=prompt, new_tokens=response)
    work = RankWork(call=call, samples=samples, lengths=workload, placed=placed, micro_batches=1)
    return work.dynamic_bytes()


def check(
    config: DecoderConfig, lengths: Lengths, recomputation: Recomputation, tp: int = 1, *, divides_tokens: bool = False
) -> None:
    compute = Computation(recomputation=recomputation, sequence_parallel=divides_tokens)
    traced = traced_bytes(config, lengths, compute, tp)
    assert traced <= planned_bytes(config, lengths, compute, tp) <= MOST * traced


@pytest.mark.parametrize("tp", [1, 2])
@RECOMPUTATIONS
@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model(name: str, recomputation: Recomputation, tp: int) -> None:
    check(MODELS[name], (8, 256, 768), recomputation, tp)


@pytest.mark.parametrize(
    ("tp", "divides_tokens"), [(1, False), (2, False), (2, True)], ids=["tp 1", "tp 2", "sequence parallel"]
)
@pytest.mark.parametrize(
    "lengths", [(1, 1024, 3072), (1, 512, 0), (3, 100, 207), (16, 256, 1792)], ids=["long", "one", "odd", "many"]
)
@RECOMPUTATIONS
@pytest.mark.parametrize("name", SHORT)
def test_micro_batches_of_all_sizes(
    name: str, recomputation: Recomputation, lengths: Lengths, tp: int, divides_tokens: bool
) -> None:
    """One sequence keeps few multiprocessors busy, and attention has an accumulator for each part of it. Few tokens
    take less than the gradients of weights; many have logits in several tiles."""
    check(SHORT[name], lengths, recomputation, tp, divides_tokens=divides_tokens)


@RECOMPUTATIONS
@pytest.mark.parametrize("lengths", [(2, 512, 0), (8, 512, 1536)], ids=["few", "many"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, lengths: Lengths, recomputation: Recomputation) -> None:
    check(FAMILIES[family], lengths, recomputation)
    if recomputation == "off":
        check(FAMILIES[family], lengths, recomputation, tp=2, divides_tokens=True)
