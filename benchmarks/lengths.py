"""Responses of very unequal lengths: what the planner predicts of a batch from their distribution, from their mean, and
from their limit, beside what the batch takes.

One worker generates 32 sequences and trains on them: a Llama of 4 M parameters in float32, prompts of 32 tokens,
responses of log-normal lengths with a mean of 48, cut at 512. Measured are batches of given responses, drawn anew for
each, beside batches whose responses all have the mean; the prediction knows the distribution alone. Parts of the model
are profiled first, in the same process, all in processor time. The ratio of the cases says how many times further from
the measured time the prediction by the mean, or by the limit, is than that by the distribution (logarithms).
`--quick` profiles fewer sizes, and measures fewer batches.
"""

import math
import random
import statistics
from collections.abc import Sequence

import torch
from lib.common import case, finish, parse_arguments
from lib.rank_share import MODEL, predicted, processor_s, profiled
from torch import Tensor

from realhf.algorithms.responses import response_logprobs, response_tokens
from realhf.api.experiment import OptimizerConfig
from realhf.api.generation import GenerationOptions
from realhf.dataflow.graph import GENERATE, TRAIN_STEP
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.interface import GenerationRequest, Stats
from realhf.engine.model import ShardedModel
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.parallel.groups import ParallelGroups
from realhf.parallel.vocabulary import Logits
from realhf.planning.model.lengths import LengthDistribution
from realhf.planning.model.workload import Workload

SEQUENCES, PROMPT, MEAN, LIMIT = 32, 32, 48, 512
SPREAD = 1.2  # standard deviation of the logarithm of a length
POPULATION = 20_000
# The prediction by the distribution is so many times nearer, at least; and so near itself.
TARGET, NEAR = 2.0, 0.25


def main() -> None:
    arguments = parse_arguments(__doc__)
    timings = profiled(
        sequences=SEQUENCES,
        sequence_length=PROMPT + MEAN,
        max_tokens=1024 if arguments.quick else 4096,
        repetitions=3 if arguments.quick else 5,
    )
    draw, worker = random.Random(0), Worker()
    population = [drawn_length(draw) for _ in range(POPULATION)]
    responses = LengthDistribution.of(population)
    ways = {
        "distribution": Workload(
            prompt_tokens=PROMPT, new_tokens=responses.mean, max_new_tokens=LIMIT, responses=responses
        ),
        "mean": Workload(prompt_tokens=PROMPT, new_tokens=round(responses.mean)),
        "limit": Workload(prompt_tokens=PROMPT, new_tokens=LIMIT),
    }
    worker.generate([4] * SEQUENCES)
    batches = 6 if arguments.quick else 48
    # All batches together have the quantiles of the distribution, so that chance plays a small part.
    count = batches * SEQUENCES
    lengths = [sorted(population)[(2 * i + 1) * POPULATION // (2 * count)] for i in range(count)]
    draw.shuffle(lengths)
    unequal, equal = [], []
    for i in range(0, count, SEQUENCES):  # in turns, so that a busy machine slows both
        unequal.append(worker.taken(lengths[i : i + SEQUENCES]))
        equal.append(worker.taken([round(responses.mean)] * SEQUENCES))
    results = []
    for number, kind in enumerate((GENERATE, TRAIN_STEP)):
        seconds = {way: predicted(kind, timings, lengths, SEQUENCES) for way, lengths in ways.items()}
        measured = {
            "responses that differ": (statistics.fmean(each[number] for each in unequal), "distribution"),
            "responses of the mean": (statistics.fmean(each[number] for each in equal), "mean"),
        }
        for name, (taken_s, way) in measured.items():
            ratio = taken_s / seconds[way]
            title = f"{kind.value}, {name}: measured, and predicted by the {way}"
            holds = abs(math.log(ratio)) <= NEAR
            results.append(case(title, taken_s, "s", baseline=seconds[way], ratio=ratio, target=1 + NEAR, holds=holds))
        taken_s = measured["responses that differ"][0]
        errors = {way: abs(math.log(taken_s / each)) for way, each in seconds.items()}
        # A training has the same tokens by the mean; it is the limit that is wrong of it.
        for way in ("mean", "limit") if kind is GENERATE else ("limit",):
            ratio = errors[way] / errors["distribution"]
            title = f"{kind.value}, responses that differ: predicted by the {way}, times further off"
            results.append(
                case(title, seconds[way], "s", baseline=taken_s, ratio=ratio, target=TARGET, holds=ratio >= TARGET)
            )
    finish("lengths", results, arguments.json)


def drawn_length(draw: random.Random) -> int:
    """Of a response."""
    logarithm = draw.gauss(math.log(MEAN) - SPREAD**2 / 2, SPREAD)
    return min(max(round(math.exp(logarithm)), 1), LIMIT)


class Worker:
    """A model that gives responses of lengths that it is told, and trains on them."""

    def __init__(self) -> None:
        alone = ParallelGroups(Layout(DeviceMesh(0, 1), ParallelStrategy()), 0)
        spec = ModelSpec(MODEL, alone, torch.float32, optimizer=OptimizerConfig(), total_optimizer_steps=10_000)
        self.model = ShardedModel(spec)
        self.model.initialise(0)
        self.generator = torch.Generator().manual_seed(0)

    def taken(self, lengths: Sequence[int]) -> tuple[float, float]:
        """Seconds of a generation of responses of these lengths, and of an optimizer step on them."""
        rollouts: list[Batch] = []
        generating_s = processor_s(lambda: rollouts.append(self.generate(lengths)))
        training_s = processor_s(lambda: self.model.train_step(rollouts[0], "seq", _loss, response_tokens, 1))
        return generating_s, training_s

    def generate(self, lengths: Sequence[int]) -> Batch:
        prompts, forced = [self._tokens(PROMPT) for _ in lengths], [self._tokens(length) for length in lengths]
        batch = Batch(tuple(range(len(lengths))), {"prompt": prompts})
        options = GenerationOptions(max_new_tokens=LIMIT, eos_token=-1)
        output = self.model.generate(batch, GenerationRequest(options, sample_key=(0, 0), forced=forced))
        return batch.with_data(seq=output.sequences)

    def _tokens(self, count: int) -> Tensor:
        return torch.randint(3, MODEL.vocab_size, (count,), generator=self.generator)


def _loss(logits: Logits, batch: Batch) -> tuple[Tensor, Stats]:
    return -response_logprobs(logits, batch).sum(), {}


if __name__ == "__main__":
    main()
