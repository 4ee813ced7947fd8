"""Generation and inference on the CPU beside Hugging Face's, in the same run with the same number of threads.

Two Llamas (4 M parameters in float32, 34 M in bfloat16), 64 prompts of 32 tokens, responses of 64 tokens or of 8 to 64.
Both sides take turns; the best processor time of each counts (one thread computes and waits for nothing: on an idle
machine that is the time on the wall, and on a busy one it still says who needs less). Also: the share of what the
machine could do (products at the rate of large ones, or weights, keys and values read once a step, whichever takes
longer), memory beyond the weights, and in bfloat16 how far the log-probabilities of generation and of the training
forward lie apart; and what AMX is worth in products, where there is it. `--quick` takes the small one. Where there is a
GPU: how near decoding with 1.5 billion parameters comes to the bandwidth of its memory (`on_gpu.py`), and nothing else.
"""

import ctypes
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from lib.common import case, case_parser, finish
from on_gpu import generation_cases
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from realhf.algorithms.functional import predicting_positions, token_logprobs
from realhf.api.generation import GenerationOptions
from realhf.architecture.model import DecoderConfig
from realhf.cpu.native import kernels
from realhf.cpu.products import pack
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.generate.loop import generate
from realhf.engine.interface import GenerationOutput, GenerationRequest
from realhf.engine.model import ShardedModel
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.parallel.groups import ParallelGroups
from realhf.parallel.linear import linear

MEASURES = (
    "realhf/cpu",
    "realhf/engine/arena.py",
    "realhf/engine/batch.py",
    "realhf/engine/forward.py",
    "realhf/engine/generate",
    "realhf/engine/model.py",
    "realhf/engine/packing.py",
    "realhf/models",
    "realhf/parallel",
    "csrc/kernels",
    "csrc/memory",
)
BATCH, PROMPT, RESPONSE, SHORTEST = 64, 32, 64, 8
VOCABULARY = 2048
PRODUCTS, PRODUCT = 40, (1536, 576)  # weights that the caches do not hold together, of a model of 135 M parameters
MODELS = {
    "4M": {"hidden_size": 256, "intermediate_size": 688, "num_layers": 4, "num_heads": 4},
    "34M": {"hidden_size": 512, "intermediate_size": 1376, "num_layers": 10, "num_heads": 8},
}
CASES = (("4M", torch.float32), ("34M", torch.bfloat16))
# (kind of lengths, what is done) -> how many times Hugging Face's tokens/s
TARGETS = {("fixed", "generation"): 2.0, ("fixed", "inference"): 1.1}
TARGETS |= {("8 to 64", "generation"): 3.0, ("8 to 64", "inference"): 1.4}


def main() -> None:
    arguments = case_parser(__doc__).parse_args()
    if torch.cuda.is_available():
        finish("generation", generation_cases(quick=arguments.quick), arguments.json)
        return
    torch.set_num_threads(1)
    results: list[dict] = []
    for name, dtype in (("4M", torch.float32),) if arguments.quick else CASES:
        kinds = [k for k in kinds_of_lengths() if f"{label(name, dtype)}, {k.kind}".startswith(arguments.case)]
        if kinds:
            results += Comparison(name, dtype, repetitions=2 if arguments.quick else 3).cases(kinds)
    if "product".startswith(arguments.case[:7]):
        results += product_cases()
    finish("generation", results, arguments.json, is_part=bool(arguments.case))


def label(name: str, dtype: torch.dtype) -> str:
    return f"{name} {str(dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Lengths:
    """Of the responses."""

    kind: str
    tokens: list[int]


def kinds_of_lengths() -> Iterable[Lengths]:
    yield Lengths("fixed", [RESPONSE] * BATCH)
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randint(SHORTEST, RESPONSE + 1, (BATCH,), generator=generator).tolist()
    yield Lengths("8 to 64", [RESPONSE, *mixed[1:]])


class Comparison:
    """One model in one dtype, ours and Hugging Face's with the same weights."""

    def __init__(self, name: str, dtype: torch.dtype, repetitions: int):
        self.name, self.dtype, self.repetitions = name, dtype, repetitions
        shape = MODELS[name]
        self.config = DecoderConfig(**shape, num_kv_heads=shape["num_heads"], vocab_size=VOCABULARY)
        groups = ParallelGroups(Layout(DeviceMesh(0, 1), ParallelStrategy()), 0)
        self.ours = ShardedModel(ModelSpec(self.config, groups, dtype))
        self.ours.initialise(seed=0)
        self.theirs = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=self.config.hidden_size,
                intermediate_size=self.config.intermediate_size,
                num_hidden_layers=self.config.num_layers,
                num_attention_heads=self.config.num_heads,
                num_key_value_heads=self.config.num_kv_heads,
                vocab_size=VOCABULARY,
                rms_norm_eps=self.config.rms_norm_eps,
                eos_token_id=None,
                pad_token_id=0,
            )
        ).to(dtype)
        self.theirs.load_state_dict({box.name: local for box, local in self.ours.residency.held()})
        generator = torch.Generator().manual_seed(1)
        self.prompts = torch.randint(1, VOCABULARY, (BATCH, PROMPT), generator=generator)

    def cases(self, kinds: list[Lengths]) -> Iterable[dict]:
        name = label(self.name, self.dtype)
        for lengths in kinds:
            tokens = sum(lengths.tokens)
            ours, theirs = self._turns(
                lambda n=lengths: self.generate(n.tokens), lambda n=lengths: self.generate_theirs(n.tokens)
            )
            yield self._case(f"{name}, {lengths.kind}", "generation", lengths.kind, tokens, ours, theirs)
            limit_s = self.limit_s(lengths.tokens)
            yield case(
                f"{name}, {lengths.kind}: share of the machine's limit in generation",
                limit_s / ours,
                "",
                baseline=limit_s / theirs,
                ratio=theirs / ours,
                target=0.3,
                holds=limit_s / ours >= 0.3,
            )
            sequences = self.generate(lengths.tokens).sequences
            ours, theirs = self._turns(lambda s=sequences: self.infer(s), lambda s=sequences: self.infer_theirs(s))
            yield self._case(f"{name}, {lengths.kind}", "inference", lengths.kind, tokens, ours, theirs)
        if all(lengths.kind != "fixed" for lengths in kinds):
            return
        yield self._memory(f"{name}, fixed: memory of generation beyond the weights")
        if self.dtype == torch.bfloat16:
            yield from self._gaps(name)

    def _case(self, label: str, what: str, kind: str, tokens: int, ours_s: float, theirs_s: float) -> dict:
        target = TARGETS[kind, what]
        return case(
            f"{label}: {what}, response tokens",
            tokens / ours_s,
            "tokens/s",
            baseline=tokens / theirs_s,
            ratio=theirs_s / ours_s,
            target=target,
            holds=theirs_s / ours_s >= target,
        )

    def _turns(self, ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[float, float]:
        """The best seconds of each; the first turn warms up."""
        best = [float("inf")] * 2
        for turn in range(self.repetitions + 1):
            for side, run in enumerate((ours, theirs)):
                start = time.process_time()
                run()
                if turn:
                    best[side] = min(best[side], time.process_time() - start)
        return best[0], best[1]

    def generate(self, lengths: list[int]) -> GenerationOutput:
        batch = Batch(tuple(range(BATCH)), {"prompt": list(self.prompts)})
        options = GenerationOptions(max_new_tokens=RESPONSE, eos_token=-1)
        return generate(self.ours.decoder, batch, GenerationRequest(options, sample_key=(0, 0), limits=lengths))[0]

    @torch.inference_mode()
    def generate_theirs(self, lengths: list[int]) -> Tensor:
        return self.theirs.generate(
            self.prompts,
            attention_mask=torch.ones_like(self.prompts),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            max_new_tokens=RESPONSE,
            stopping_criteria=StoppingCriteriaList([_EndsAt(torch.tensor(lengths) + PROMPT)]),
        )

    def infer(self, sequences: list[Tensor]) -> Tensor:
        """[response tokens], as an interface of ours does it."""
        batch = Batch(tuple(range(BATCH)), {"seq": sequences})

        def logprobs(logits: object, part: Batch) -> dict[str, list[Tensor]]:
            packed = part.packed("seq")
            places = predicting_positions(packed.lengths, [PROMPT] * BATCH, self.prompts.device)
            found = token_logprobs(logits[places], packed.values[places + 1])
            return {"logprob": list(found.split([n - PROMPT for n in packed.lengths]))}

        return torch.cat(self.ours.forward(batch, "seq", logprobs, 1)["logprob"])

    @torch.inference_mode()
    def infer_theirs(self, sequences: list[Tensor]) -> Tensor:
        """The same, padded."""
        lengths = torch.tensor([len(s) for s in sequences])
        tokens = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        is_token = torch.arange(tokens.shape[1]) < lengths[:, None]
        keep = tokens.shape[1] - PROMPT + 1  # logits of the last prompt token and of the response
        logits = self.theirs(tokens, attention_mask=is_token.long(), logits_to_keep=keep).logits[:, :-1].float()
        picked = logits.gather(-1, tokens[:, PROMPT:, None])[..., 0] - logits.logsumexp(-1)
        return picked[is_token[:, PROMPT:]]

    def limit_s(self, lengths: list[int]) -> float:
        """Products at the rate of large ones, or what must be read, at the speed of a large sum: the longer of both."""
        config, item = self.config, self.dtype.itemsize
        layer = 4 * config.hidden_size**2 + 3 * config.hidden_size * config.intermediate_size
        head = config.hidden_size * VOCABULARY
        computed = sum(PROMPT + n - 1 for n in lengths)
        products = 2 * (config.num_layers * layer * computed + head * sum(lengths))
        kv = 2 * config.num_layers * config.hidden_size * item  # a token's
        read = RESPONSE * (config.num_layers * layer + head) * item
        read += sum(kv * (PROMPT + step) for n in lengths for step in range(n))
        return max(products / matmul_rate(self.dtype), read / read_bandwidth())

    def _memory(self, label: str) -> dict:
        ours, theirs = (
            peak_bytes(lambda f=run: f([RESPONSE] * BATCH)) for run in (self.generate, self.generate_theirs)
        )
        return case(
            label, ours / 2**20, "MiB", baseline=theirs / 2**20, ratio=theirs / ours, target=1.0, holds=ours <= theirs
        )

    def _gaps(self, label: str) -> Iterable[dict]:
        """Beside it: what rounding alone does, as two implementations of one forward differ by it."""
        output = self.generate([RESPONSE] * BATCH)
        trained, theirs = self.infer(output.sequences), self.infer_theirs(output.sequences)
        gap, rounding = (torch.cat(output.logprobs) - trained).abs(), (theirs - trained).abs()
        for name, of in (("mean", Tensor.mean), ("99th percentile", lambda x: x.quantile(0.99))):
            value, baseline = of(gap).item(), of(rounding).item()
            yield case(
                f"{label}: {name} of |log-probability in generation - in training's forward|",
                value,
                "nats",
                baseline=baseline,
                ratio=baseline / value,
                target=0.5,
                holds=baseline / value >= 0.5,
            )


class _EndsAt(StoppingCriteria):
    def __init__(self, lengths: Tensor):
        self.lengths = lengths

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        return input_ids.shape[1] >= self.lengths


def product_cases() -> Iterable[dict]:
    """Our kernel's products of bfloat16 weights beside torch's, and with matrix registers beside those without, where
    the processor has them; products of training beside torch's, where these are not the same."""
    kinds = kernels.Instructions
    weights = [torch.randn(*PRODUCT).bfloat16() for _ in range(PRODUCTS)]
    packed = list(filter(None, map(pack, weights)))
    for rows in (16, 256):
        x = torch.randn(rows, PRODUCT[1]).bfloat16()
        name = f"product of {rows} rows with a bfloat16 weight {list(PRODUCT)}"
        ours = [partial(weight.product, x) for weight in packed]
        yield _beside(f"{name}, beside torch's", ours, [partial(F.linear, x, weight) for weight in weights])
        if kernels.use_instructions(kinds.amx) == kinds.amx:
            without = [partial(kernels.use_instructions, kinds.avx512), *ours]
            yield _beside(f"{name}, beside no AMX", [partial(kernels.use_instructions, kinds.amx), *ours], without)
            kernels.use_instructions(kinds.amx)
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        x, weight = (torch.randn(*shape).bfloat16().requires_grad_() for shape in ((1024, PRODUCT[1]), PRODUCT))
        name = f"product of 1,024 rows with a bfloat16 weight {list(PRODUCT)} and its gradients, beside torch's"
        yield _beside(name, *([partial(_with_gradients, function, x, weight)] for function in (linear, F.linear)))


def _with_gradients(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> None:
    product(x, weight).sum().backward()


def _beside(name: str, ours: list[Callable[[], object]], other: list[Callable[[], object]]) -> dict:
    """The time of one of our functions beside one of the others'."""
    own_s, other_s = (_best_s(lambda each=each: [work() for work in each]) / len(each) for each in (ours, other))
    ratio = other_s / own_s
    return case(name, own_s * 1e3, "ms", baseline=other_s * 1e3, ratio=ratio, target=1.0, holds=ratio >= 1)


def matmul_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a large product."""
    x, weight = torch.randn(1024, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
    return 2 * 1024**3 / _best_s(lambda: linear(x, weight))


def read_bandwidth() -> float:
    """bytes/s of a sum over more than the caches hold."""
    x = torch.ones(64 << 20)
    return x.nbytes / _best_s(x.sum)


def _best_s(work: Callable[[], object]) -> float:
    def once() -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    return min(once() for _ in range(10))


def peak_bytes(work: Callable[[], object]) -> int:
    """By how much the resident memory grows at most while `work` runs."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before is to be counted again
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = _status_bytes("VmRSS")
    work()
    return max(_status_bytes("VmHWM") - before, 1)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


if __name__ == "__main__":
    main()
