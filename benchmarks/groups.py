"""Several responses to a prompt: what the planner predicts of a group's generation and training, beside what they take.

One worker's share of a GRPO step: 32 sequences of 32 + 64 tokens on a Llama of 4 M parameters in float32, responses in
groups of 1, 8 and 32, and four optimizer steps on them. Parts of the model are profiled first, in the same process. All
of it in processor time: one thread computes and waits for nothing, so a busy machine counts little. A ratio is measured
over predicted. `--quick` profiles fewer sizes.
"""

import statistics
from collections.abc import Callable

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
from realhf.planning.model.workload import Workload

SEQUENCES, PROMPT, RESPONSE, MINI_BATCHES = 32, 32, 64, 4
TARGET = 0.15  # by how much a measured time may differ from the predicted one


def main() -> None:
    arguments = parse_arguments(__doc__)
    timings = profiled(
        sequences=SEQUENCES,
        sequence_length=PROMPT + RESPONSE,
        max_tokens=1024 if arguments.quick else 4096,
        repetitions=3 if arguments.quick else 5,
    )
    share = Share()
    works: dict[str, tuple[Callable[[], object], float]] = {
        f"generation, {group} responses to a prompt": (
            lambda group=group: share.generate(group),
            predicted(GENERATE, timings, lengths_of(group), SEQUENCES),
        )
        for group in (1, 8, SEQUENCES)
    }
    training_s = predicted(TRAIN_STEP, timings, lengths_of(8), SEQUENCES, MINI_BATCHES)
    works["training, four optimizer steps"] = share.train, training_s
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(3 if arguments.quick else 7):
        for name, (work, _) in works.items():
            taken[name].append(processor_s(work))
    results = []
    for name, (_, expected) in works.items():
        measured = statistics.median(taken[name][1:])
        ratio = measured / expected
        holds = abs(ratio - 1) <= TARGET
        results.append(case(name, measured, "s", baseline=expected, ratio=ratio, target=1 + TARGET, holds=holds))
    finish("groups", results, arguments.json)


def lengths_of(group: int) -> Workload:
    return Workload(prompt_tokens=PROMPT, new_tokens=RESPONSE, samples_per_prompt=group)


class Share:
    """What a worker does of a step: it answers prompts, and trains on the answers."""

    def __init__(self) -> None:
        alone = ParallelGroups(Layout(DeviceMesh(0, 1), ParallelStrategy()), 0)
        spec = ModelSpec(MODEL, alone, torch.float32, optimizer=OptimizerConfig(), total_optimizer_steps=10_000)
        self.model = ShardedModel(spec)
        self.model.initialise(0)
        generator = torch.Generator().manual_seed(0)
        self.prompts = [torch.randint(3, MODEL.vocab_size, (PROMPT,), generator=generator) for _ in range(SEQUENCES)]
        self.rollout = self.generate(8)

    def generate(self, group: int) -> Batch:
        batch = Batch(tuple(range(SEQUENCES)), {"prompt": [self.prompts[i // group] for i in range(SEQUENCES)]})
        options = GenerationOptions(max_new_tokens=RESPONSE, eos_token=-1, samples_per_prompt=group)
        output = self.model.generate(batch, GenerationRequest(options, sample_key=(0, 0)))
        return batch.with_data(seq=output.sequences)

    def train(self) -> None:
        for part in self.rollout.split(MINI_BATCHES):
            self.model.train_step(part, "seq", _loss, response_tokens, 1)


def _loss(logits: Logits, batch: Batch) -> tuple[Tensor, Stats]:
    return -response_logprobs(logits, batch).sum(), {}


if __name__ == "__main__":
    main()
