"""Training on one device beside a plain transformers loop: tokens/s, share of the matmul rate, peak memory.

Two Llamas (4 M parameters in float32, 34 M in bfloat16) from random weights, 64 sequences a step, one optimizer step on
each: prompts of 32 tokens, responses of 64, or of 8 to 64 where transformers pads and we pack. Both sides compute the
cross entropy of the responses, clip the gradient and take an AdamW step, in turns, and the best time of each counts.
Speed has a target; the other two are for reading. Where there is a GPU: training with 1.5 billion parameters against
the rate of a large product (`on_gpu.py`), and nothing else.

Command: python benchmarks/training.py --json benchmarks/results/training.json
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from lib.common import case, case_parser, finish
from lib.peak_memory import PeakMemory
from on_gpu import training_cases
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from realhf.algorithms.functional import predicting_positions, token_logprobs
from realhf.api.experiment import OptimizerConfig
from realhf.architecture.model import DecoderConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.interface import Stats
from realhf.engine.model import ShardedModel
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.parameters import decoder_parameters
from realhf.parallel.groups import ParallelGroups
from realhf.parallel.linear import linear
from realhf.parallel.vocabulary import Logits

MEASURES = (
    "realhf/algorithms/functional/tokens.py",
    "realhf/cpu",
    "realhf/engine/arena.py",
    "realhf/engine/batch.py",
    "realhf/engine/forward.py",
    "realhf/engine/model.py",
    "realhf/engine/packing.py",
    "realhf/engine/train",
    "realhf/models",
    "realhf/parallel",
    "csrc/kernels",
    "csrc/memory",
)
SAMPLES, PROMPT, LONGEST, SHORTEST = 64, 32, 64, 8
VOCAB = 1024
MODELS = {
    "4M": DecoderConfig(
        hidden_size=256, intermediate_size=704, num_layers=4, num_heads=8, num_kv_heads=8, vocab_size=VOCAB
    ),
    "34M": DecoderConfig(
        hidden_size=512, intermediate_size=1408, num_layers=10, num_heads=8, num_kv_heads=8, vocab_size=VOCAB
    ),
}
CASES = (("4M", torch.float32), ("34M", torch.bfloat16))
TARGETS = {"equal": 1.05, "ragged": 1.4}
ONE_RANK = ParallelGroups(Layout(DeviceMesh(0, 1), ParallelStrategy()), 0)
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


@dataclass(frozen=True)
class Side:
    """One engine, ready to step."""

    step: Callable[[], object]
    peak_bytes: int  # of what a step allocates beyond parameters, gradients and optimizer states


def sequences(lengths: str) -> list[Tensor]:
    """Prompts and responses of random tokens, int64."""
    generator = torch.Generator().manual_seed(0)
    shortest = LONGEST if lengths == "equal" else SHORTEST
    sizes = PROMPT + torch.randint(shortest, LONGEST + 1, (SAMPLES,), generator=generator)
    return [torch.randint(VOCAB, (n,), generator=generator) for n in sizes.tolist()]


def response_loss(logits: Logits, batch: Batch) -> tuple[Tensor, Stats]:
    tokens = batch.packed("tokens")
    places = predicting_positions(tokens.lengths, [PROMPT] * len(batch), logits.device)
    return -token_logprobs(logits[places], tokens.values[places + 1]).sum(), {}


def response_tokens(batch: Batch) -> float:
    return float(sum(len(tokens) - PROMPT for tokens in batch.data["tokens"]))


def ours(config: DecoderConfig, dtype: torch.dtype, tokens: list[Tensor]) -> Side:
    optimizer = OptimizerConfig(lr=ADAMW["lr"])
    model = ShardedModel(ModelSpec(config, ONE_RANK, dtype, optimizer=optimizer, total_optimizer_steps=10_000))
    model.initialise(seed=0)
    batch = Batch(tuple(range(SAMPLES)), {"tokens": tokens})

    def step() -> None:
        model.train_step(batch, "tokens", response_loss, response_tokens, micro_batches=1)

    return Side(step, peak_bytes(step))


def transformers_loop(config: DecoderConfig, dtype: torch.dtype, tokens: list[Tensor]) -> Side:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            vocab_size=VOCAB,
            use_cache=False,
        )
    ).to(dtype)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)  # [samples, longest]
    places = torch.arange(ids.shape[1])
    is_token = places < torch.tensor([len(t) for t in tokens])[:, None]
    labels = ids.masked_fill(~is_token | (places < PROMPT), -100)
    # Sequences of one length need no mask, and attention is faster without.
    mask = None if bool(is_token.all()) else is_token.long()

    def step() -> None:
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the optimizer's states
    return Side(step, peak_bytes(step))


def peak_bytes(step: Callable[[], object]) -> int:
    with PeakMemory() as memory:
        step()
    return memory.peak_bytes


def seconds(step: Callable[[], object]) -> float:
    """Of this process's one thread on a processor: what others run beside it does not count."""
    start = time.process_time()
    step()
    return time.process_time() - start


def matmul_flops(config: DecoderConfig, dtype: torch.dtype, rows: int) -> float:
    """The best rate of the MLP's product at this many rows, FLOP/s."""
    x = torch.randn(rows, config.hidden_size, dtype=dtype)
    weight = torch.randn(config.intermediate_size, config.hidden_size, dtype=dtype)
    best = min(seconds(lambda: linear(x, weight)) for _ in range(10))
    return 2 * rows * weight.numel() / best


def training_flops(config: DecoderConfig, tokens: list[Tensor]) -> float:
    """6 a weight of a product and token that goes through it: all in layers, those of responses in the head (Kaplan
    et al., 2020, section 2.1); attention is left out."""
    sizes = dict.fromkeys(("embedding", "layer", "head"), 0)
    for spec in decoder_parameters(config):
        sizes[spec.place] += spec.size if len(spec.shape) == 2 else 0
    in_all = sum(map(len, tokens))
    return 6.0 * (sizes["layer"] * in_all + sizes["head"] * (in_all - PROMPT * len(tokens)))


def measure(name: str, dtype: torch.dtype, lengths: str, rounds: int) -> list[dict]:
    config, tokens = MODELS[name], sequences(lengths)
    count = sum(map(len, tokens))
    sides = [ours(config, dtype, tokens), transformers_loop(config, dtype, tokens)]
    times = [[seconds(side.step) for side in sides] for _ in range(rounds)]
    best, baseline = (min(column) for column in zip(*times, strict=True))
    share = training_flops(config, tokens) / best / matmul_flops(config, dtype, count)
    ratio, target = baseline / best, TARGETS[lengths]
    mine, theirs = (side.peak_bytes / 2**20 for side in sides)
    title = f"{name} {str(dtype).removeprefix('torch.')} {lengths}"
    return [
        case(
            f"{title}: speed", count / best, "tokens/s",
            baseline=count / baseline, ratio=ratio, target=target, holds=ratio >= target,
        ),
        case(
            f"{title}: share of the matmul rate", share, "fraction",
            baseline=share / ratio, ratio=ratio, target=0.0, holds=True,
        ),
        case(
            f"{title}: peak of a step", mine, "MiB",
            baseline=theirs, ratio=theirs / mine, target=0.0, holds=True,
        ),
    ]  # fmt: skip


def main() -> None:
    arguments = case_parser(__doc__).parse_args()
    if torch.cuda.is_available():
        finish("training", training_cases(quick=arguments.quick), arguments.json)
        return
    torch.set_num_threads(1)
    cases = CASES[:1] if arguments.quick else CASES
    results = [
        row
        for name, dtype in cases
        for lengths in TARGETS
        if f"{name} {dtype} {lengths}".replace("torch.", "").startswith(arguments.case)
        for row in measure(name, dtype, lengths, rounds=5 if name == "4M" and not arguments.quick else 2)
    ]
    finish("training", results, arguments.json, is_part=bool(arguments.case))


if __name__ == "__main__":
    main()
