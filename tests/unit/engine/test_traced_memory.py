"""The planner's bytes of trainings and inferences on a GPU against a trace of the engine's tensors on `meta`.

Kernels of CUDA that have memory of their own beside tensors (cuBLAS, sorting) are not in the trace. Losses have no
entropy.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.lib.peak_memory import PeakMemory
from realhf.api.experiment import OptimizerConfig
from realhf.architecture.compute import Computation, Recomputation
from realhf.architecture.model import DecoderConfig, Experts
from realhf.architecture.named import ARCHITECTURES
from realhf.dataflow.graph import INFERENCE, TRAIN_STEP, ModelFunctionCallDef, ModelInterfaceType
from realhf.dataflow.interface import InterfaceConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.forward import run_stage
from realhf.engine.model import ShardedModel
from realhf.engine.packing import pack_micro_batch
from realhf.engine.pipeline import Neighbours, run_forward, run_training
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.pipeline_schedule import Pass
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
ALL_KEPT = Computation()
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


def traced_logsumexp(x: Tensor, dim: int, *, out: Tensor) -> Tensor:
    """With the tensors that torch's operator makes inside."""
    greatest = x.amax(dim, keepdim=True)
    return torch.sum((x - greatest).exp_(), dim, out=out)


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
    monkeypatch.setattr(torch, "logsumexp", traced_logsumexp)


# Samples of a micro-batch, tokens of a prompt, and of a response (0: all tokens get logits).
Lengths = tuple[int, int, int]
ONE = ParallelStrategy()


@dataclass(frozen=True)
class Case:
    config: DecoderConfig
    lengths: Lengths
    compute: Computation = ALL_KEPT
    strategy: ParallelStrategy = ONE
    micro_batches: int = 1
    kind: ModelInterfaceType = TRAIN_STEP


def traced_bytes(case: Case, stage: int) -> int:
    """The most of all passes on a rank of `stage`, beside parameters, gradients and states."""
    samples, prompt, response = case.lengths
    layout, device = Layout(DeviceMesh(0, case.strategy.size), case.strategy), torch.device("meta")
    rank = layout.device(0, 0, stage)
    with as_rank(rank, case.strategy.size):
        groups = GroupTable([layout], rank).groups(layout)
        spec = ModelSpec(case.config, groups, torch.bfloat16, device, optimizer=OptimizerConfig(), compute=case.compute)
        decoder = ShardedModel(spec).decoder
        group = groups.tensor if case.compute.sequence_parallel else None

        def train(at: Pass, hidden: Tensor | None) -> Tensor:
            i = at.micro_batch
            output = run_stage(decoder, packed[i], hidden, shards[i], case.compute.recomputed, at.chunk)
            if decoder.has_head(at.chunk):
                return loss_of(output, samples * (response or prompt))
            assert isinstance(output, Tensor)
            return output

        def infer(at: Pass, hidden: Tensor | None) -> Tensor | None:
            output = train(at, hidden)
            return None if decoder.has_head(at.chunk) else output

        with PeakMemory() as memory, torch.set_grad_enabled(case.kind == TRAIN_STEP):
            tokens = [torch.zeros(prompt + response, dtype=torch.int64)] * samples
            packed = [pack_micro_batch(tokens, device) for _ in range(case.micro_batches)]
            shards = [None if group is None else TokenShards(group, len(p.tokens)) for p in packed]
            counts = [len(p.tokens) if s is None else s.count for p, s in zip(packed, shards, strict=True)]
            like = torch.empty((), dtype=torch.bfloat16, device=device)
            neighbours = Neighbours(groups, case.config.hidden_size, like, 60.0)
            if case.kind == TRAIN_STEP:
                run_training(neighbours, counts, train)
            else:
                run_forward(neighbours, counts, infer)
    return memory.peak_bytes


def loss_of(output: Tensor | Logits, trained: int) -> Tensor:
    """Of as many tokens; its own tensors are few numbers a token."""
    if isinstance(output, Tensor):
        return output.float().sum()
    tokens = torch.zeros(trained, dtype=torch.int64, device="meta")
    return -output[tokens].of_tokens(tokens).logprob.sum()


def planned_bytes(case: Case) -> float:
    """On the stage that has the most."""
    samples, prompt, response = case.lengths
    call = ModelFunctionCallDef(
        model_name="m",
        model_type=case.config,
        interface_type=case.kind,
        interface_impl=InterfaceConfig(),
        input_data=["x"],
    )
    placed = PlacedModel(case.config, case.strategy, "bfloat16", ENGINE.on(H100).under(case.compute))
    workload = Workload(prompt_tokens=prompt, new_tokens=response)
    work = RankWork(
        call=call,
        samples=samples * case.micro_batches,
        lengths=workload,
        placed=placed,
        micro_batches=case.micro_batches,
    )
    return work.dynamic_bytes()


def check(*fields: Any, stages: Iterable[int] = (0,)) -> None:
    """`fields`: those of a `Case`."""
    case = Case(*fields)
    traced = max(traced_bytes(case, stage) for stage in stages)
    assert traced <= planned_bytes(case) <= MOST * traced


@pytest.mark.parametrize("tp", [1, 2])
@RECOMPUTATIONS
@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model(name: str, recomputation: Recomputation, tp: int) -> None:
    check(MODELS[name], (8, 256, 768), Computation(recomputation=recomputation), ParallelStrategy(tp=tp))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "lengths", [(1, 1024, 3072), (1, 512, 0), (3, 100, 207), (16, 256, 1792)], ids=["long", "one", "odd", "many"]
)
@RECOMPUTATIONS
@pytest.mark.parametrize("name", SHORT)
def test_micro_batches_of_all_sizes(name: str, recomputation: Recomputation, lengths: Lengths, tp: int) -> None:
    """One sequence keeps few multiprocessors busy, and attention has an accumulator for each part of it. Few tokens
    take less than the gradients of weights; many have logits in several tiles."""
    check(SHORT[name], lengths, Computation(recomputation=recomputation), ParallelStrategy(tp=tp))
    if tp > 1:
        divided = Computation(recomputation=recomputation, sequence_parallel=True)
        check(SHORT[name], lengths, divided, ParallelStrategy(tp=tp))


@RECOMPUTATIONS
@pytest.mark.parametrize("lengths", [(2, 512, 0), (8, 512, 1536)], ids=["few", "many"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, lengths: Lengths, recomputation: Recomputation) -> None:
    check(FAMILIES[family], lengths, Computation(recomputation=recomputation))
    if recomputation == "off":
        check(replace(FAMILIES[family], vocab_size=64), (1, 4, 4))
        check(FAMILIES[family], lengths, Computation(sequence_parallel=True), ParallelStrategy(tp=2))
        check(FAMILIES[family], lengths, ALL_KEPT, ONE, 2, INFERENCE)


@RECOMPUTATIONS
@pytest.mark.parametrize("lengths", [(5, 333, 0), (7, 90, 800)], ids=["few", "many"])
@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-14b", "qwen3-4b"])
def test_models_that_the_formulas_were_not_made_for(name: str, lengths: Lengths, recomputation: Recomputation) -> None:
    config = replace(ARCHITECTURES[name], num_layers=5)
    check(config, lengths, Computation(recomputation=recomputation))
    check(config, lengths, Computation(recomputation=recomputation, sequence_parallel=True), ParallelStrategy(tp=2))
    if recomputation == "off":
        check(config, lengths, ALL_KEPT, ParallelStrategy(tp=2), 3, INFERENCE)


@pytest.mark.parametrize("kind", [TRAIN_STEP, INFERENCE])
@pytest.mark.parametrize(
    ("columns", "rows"),
    [(32000, 4000), (32000, 5000), (32000, 8300), (32000, 13000), (151936, 890), (300000, 600), (520000, 600)],
)
def test_tiles_of_logits(columns: int, rows: int, kind: ModelInterfaceType) -> None:
    """One tile; two and three, the last of which is small; four; two of many columns; two parts of the vocabulary,
    alike or not."""
    for hidden_size in (512, 4096):
        narrow = replace(SMALL, num_layers=1, hidden_size=hidden_size, attention_head_dim=64, vocab_size=columns)
        check(replace(narrow, tied_embeddings=False), (1, 1, rows), ALL_KEPT, ONE, 1, kind)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("lengths", [(8, 256, 768), (64, 256, 768), (1, 300, 0)], ids=["some", "many", "one"])
@pytest.mark.parametrize("name", SHORT)
def test_inferences(name: str, lengths: Lengths, tp: int) -> None:
    check(SHORT[name], lengths, ALL_KEPT, ParallelStrategy(tp=tp), 1, INFERENCE)


@pytest.mark.parametrize("wide", ["norm", "heads", "all heads", "normalised heads"])
def test_layers_with_a_narrow_mlp(wide: str) -> None:
    """Behind a norm or in attention a pass then has the most; of short sequences attention pads each, of a
    single one it computes parts at once."""
    heads = {"norm": (2, 2), "heads": (16, 2), "all heads": (16, 16), "normalised heads": (16, 2)}[wide]
    config = replace(
        SMALL, num_layers=2, vocab_size=64, intermediate_size=64, hidden_size=512, attention_head_dim=128,
        num_heads=heads[0], num_kv_heads=heads[1], qk_norm=wide == "normalised heads", tied_embeddings=False,
    )  # fmt: skip
    check(config, (8, 256, 768), ALL_KEPT, ONE, 1, INFERENCE)
    check(config, (256, 8, 24))
    check(config, (1, 256, 768))
    check(replace(config, attention_head_dim=80), (8, 256, 768))


@pytest.mark.parametrize(("pp", "chunks", "micro_batches"), [(2, 1, 2), (2, 1, 5), (4, 1, 4), (2, 2, 6)])
@pytest.mark.parametrize("recomputation", ["off", "full"])
def test_stages(recomputation: Recomputation, pp: int, chunks: int, micro_batches: int) -> None:
    """Messages, and layers that wait for their backward pass. The first stage or the last one has the most."""
    config, lengths = replace(ARCHITECTURES["llama3-8b"], num_layers=4), (4, 512, 512)
    compute = Computation(recomputation=recomputation, sequence_parallel=True)
    strategy = ParallelStrategy(pp=pp, tp=2, chunks=chunks)
    check(config, lengths, compute, strategy, micro_batches, stages=(0, pp - 1))
    if recomputation == "off":
        check(config, lengths, ALL_KEPT, strategy, micro_batches, INFERENCE, stages=(0, pp - 1))


def test_some_layers_that_are_run_again() -> None:
    for layers in range(1, 4):
        check(SHORT["7b"], (4, 512, 512), Computation(recomputation="full", recomputed_layers=layers))


MIXTURES = {
    "few": replace(LARGE, num_layers=3, num_kv_heads=8, intermediate_size=14336, experts=Experts(count=8, per_token=2)),
    "many": replace(
        ARCHITECTURES["qwen3-4b"], num_layers=3, intermediate_size=1024, experts=Experts(count=32, per_token=8)
    ),
}


@RECOMPUTATIONS
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts(name: str, tp: int, recomputation: Recomputation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans count on the most uneven routing: all tokens go through the same experts. Even routing takes no more."""
    config = MIXTURES[name]

    def even(ids: Tensor, minlength: int) -> Tensor:
        return torch.full((minlength,), len(ids) // minlength)

    def uneven(ids: Tensor, minlength: int) -> Tensor:
        return (torch.arange(minlength) < config.experts.per_token) * (len(ids) // config.experts.per_token)

    compute, strategy = Computation(recomputation=recomputation, sequence_parallel=tp > 1), ParallelStrategy(tp=tp)
    train, infer = (config, (8, 512, 512), compute, strategy), (config, (8, 512, 512), ALL_KEPT, strategy, 1, INFERENCE)
    monkeypatch.setattr(Tensor, "bincount", uneven)
    check(*train)
    check(*infer)
    monkeypatch.setattr(Tensor, "bincount", even)
    for case in (Case(*train), Case(*infer)):
        assert traced_bytes(case, 0) <= planned_bytes(case)
