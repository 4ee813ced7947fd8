"""The GPU cases of `generation.py` and `training.py`: a model of 1.5 billion parameters against what the GPU could do.

Decoding reads the weights and the keys and values of all sequences once a step: the limit is what the memory's measured
bandwidth gives. Training is held against the measured rate of a large bfloat16 product. Nobody has run this yet.

Command: python benchmarks/on_gpu.py --json benchmarks/results/on_gpu.json
"""

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from lib.common import argument_parser, case, finish
from torch import Tensor

from realhf.algorithms.functional import predicting_positions, token_logprobs
from realhf.api.experiment import OptimizerConfig
from realhf.api.generation import GenerationOptions
from realhf.architecture.decoding import GraphLife
from realhf.architecture.model import DecoderConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.interface import GenerationRequest, Stats
from realhf.engine.model import ShardedModel
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.parameters import decoder_parameters, parameter_count
from realhf.parallel.groups import ParallelGroups
from realhf.parallel.vocabulary import Logits

# Qwen2.5-1.5B's shape.
MODEL = DecoderConfig(
    hidden_size=1536, intermediate_size=8960, num_layers=28, num_heads=12, num_kv_heads=2, vocab_size=151_936,
    tied_embeddings=True, qkv_bias=True, rope_theta=1e6, rms_norm_eps=1e-6,
)  # fmt: skip
DTYPE = torch.bfloat16
ONE_RANK = ParallelGroups(Layout(DeviceMesh(0, 1), ParallelStrategy()), 0)
SEQUENCES, PROMPT, FEW_STEPS, MANY_STEPS = 128, 512, 32, 288
TRAINED_SEQUENCES, TRAINED_LENGTH = 8, 1024
TARGET_OF_BANDWIDTH, TARGET_OF_MATMUL_RATE = 0.6, 0.45


def generation_cases(*, quick: bool = False, device: str = "cuda") -> list[dict]:
    """Decode steps of 128 sequences, as graphs and kernel by kernel."""
    model = build(_model(quick), device)
    bandwidth = copy_bandwidth(device)
    return [_decode_case(model, graphs, bandwidth, 8 if quick else SEQUENCES, device) for graphs in ("kept", "off")]


def training_cases(*, quick: bool = False, device: str = "cuda") -> list[dict]:
    """One optimizer step on 8 sequences of 1,024 tokens, without recomputation."""
    config = _model(quick)
    model = build(config, device, OptimizerConfig(lr=1e-5))
    count, length = (2, 32) if quick else (TRAINED_SEQUENCES, TRAINED_LENGTH)
    batch = Batch(tuple(range(count)), {"tokens": list(_tokens(config, count, length, device))})

    def step() -> None:
        model.train_step(batch, "tokens", next_token_loss, lambda part: float(len(part) * (length - 1)), 1)

    seconds = best_seconds(step, device)
    share = training_flops(config, count, length) / seconds / matmul_rate(device, 256 if quick else 8192)
    title = f"{parameter_count(config) / 1e9:.2g}B bfloat16 on {_name(device)}"
    return [
        case(
            f"{title}: training", count * length / seconds, "tokens/s",
            baseline=None, ratio=None, target=0.0, holds=True,
        ),
        case(
            f"{title}: training, share of the matmul rate", share, "fraction",
            baseline=1.0, ratio=share, target=TARGET_OF_MATMUL_RATE, holds=share >= TARGET_OF_MATMUL_RATE,
        ),
    ]  # fmt: skip


def build(config: DecoderConfig, device: str, optimizer: OptimizerConfig | None = None) -> ShardedModel:
    model = ShardedModel(ModelSpec(config, ONE_RANK, DTYPE, device, optimizer=optimizer, total_optimizer_steps=1000))
    torch.manual_seed(0)
    for _, local in model.residency.held():
        local.normal_(std=0.02)
    model.residency.written()
    return model


def next_token_loss(logits: Logits, batch: Batch) -> tuple[Tensor, Stats]:
    """Of all tokens but the first of each sequence."""
    tokens = batch.packed("tokens")
    places = predicting_positions(tokens.lengths, [1] * len(batch), logits.device)
    return -token_logprobs(logits[places], tokens.values[places + 1]).sum(), {}


def step_bytes(config: DecoderConfig, sequences: int, context: float) -> float:
    """What a decode step must read: every weight of a product, keys and values of the sequences so far."""
    weights = sum(spec.size for spec in decoder_parameters(config) if len(spec.shape) == 2)
    kv = 2 * config.num_layers * config.kv_size * context * sequences
    return (weights + kv) * DTYPE.itemsize


def training_flops(config: DecoderConfig, sequences: int, length: int) -> float:
    """6 a weight of a product and token (Kaplan et al., 2020, section 2.1), and attention's two products: causal, half
    of length x length scores a head, forward once and backward twice."""
    sizes = [spec.size for spec in decoder_parameters(config) if len(spec.shape) == 2]
    attention = 3 * 2 * 2 * config.num_layers * config.query_size * length**2 / 2
    return 6.0 * sum(sizes) * sequences * length + attention * sequences


def copy_bandwidth(device: str) -> float:
    """bytes/s read and written by a copy of more than the caches hold."""
    source = torch.ones((1 << 30) if device == "cuda" else (1 << 24), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_seconds(lambda: target.copy_(source), device, repetitions=10)


def matmul_rate(device: str, size: int) -> float:
    """FLOP/s of a product of two large matrices."""
    a, b = (torch.randn(size, size, device=device).to(DTYPE) for _ in range(2))
    return 2 * size**3 / best_seconds(lambda: a @ b, device, repetitions=10)


def best_seconds(work: Callable[[], object], device: str, repetitions: int = 5) -> float:
    """On the wall, from an idle device to an idle device; two runs warm up."""
    best = float("inf")
    for turn in range(repetitions + 2):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        if turn >= 2:
            best = min(best, time.perf_counter() - start)
    return best


def _decode_case(model: ShardedModel, graphs: GraphLife, bandwidth: float, sequences: int, device: str) -> dict:
    """A step's seconds are the difference of two generations, over the difference of their steps."""
    prompts = list(_tokens(model.config, sequences, PROMPT, device))
    batch = Batch(tuple(range(sequences)), {"prompt": prompts})
    # Room for the longer one, so that both use the same pages and graphs.
    options = GenerationOptions(max_new_tokens=MANY_STEPS, eos_token=-1, decode_graphs=graphs)

    def generate(steps: int) -> float:
        shorter = replace(options, max_new_tokens=steps)
        arguments = {"sample_key": (0, 0), "micro_batches": 1}
        return best_seconds(
            lambda: model.generate(batch, GenerationRequest(shorter, **arguments)), device, repetitions=3
        )

    few, many = (2, 6) if device == "cpu" else (FEW_STEPS, MANY_STEPS)
    longer_s = generate(many)
    seconds = (longer_s - generate(few)) / (many - few)
    limit_s = step_bytes(model.config, sequences, PROMPT + (few + many) / 2) / bandwidth
    share = limit_s / seconds if seconds > 0 else 0.0
    how = "as graphs" if graphs == "kept" else "kernel by kernel"
    return case(
        f"{parameter_count(model.config) / 1e9:.2g}B bfloat16 on {_name(device)}: decode of {sequences} sequences "
        f"{how}, share of the bandwidth's limit",
        share, "fraction", baseline=1.0, ratio=share, target=TARGET_OF_BANDWIDTH, holds=share >= TARGET_OF_BANDWIDTH,
    )  # fmt: skip


def _model(quick: bool) -> DecoderConfig:
    """`quick`: so small that the CPU computes it, to see that everything runs."""
    if not quick:
        return MODEL
    return replace(MODEL, hidden_size=96, intermediate_size=64, num_layers=2, vocab_size=512)


def _tokens(config: DecoderConfig, count: int, length: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (count, length), generator=generator).to(device)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


CASES = {"generation": generation_cases, "training": training_cases}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {' and '.join(CASES)}; default: both")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: with --quick, whether it runs")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "torch sees no GPU here; run it where there is one, or see whether it runs with --quick --device cpu"
        )
    results = [
        row for name in arguments.cases or CASES for row in CASES[name](quick=arguments.quick, device=arguments.device)
    ]
    finish("on_gpu", results, arguments.json)


if __name__ == "__main__":
    main()
