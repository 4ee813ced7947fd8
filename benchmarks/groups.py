"""Several responses to a prompt: what the planner predicts of a group's generation and training, beside what they take.

One worker's share of a GRPO step: 32 sequences of 32 + 64 tokens on a Llama of 4 M parameters in float32, responses in
groups of 1, 8 and 32, and four optimizer steps on them. Parts of the model are profiled first, in the same process. All
of it in processor time: one thread computes and waits for nothing, so a busy machine counts little. A ratio is measured
over predicted. `--quick` profiles fewer sizes.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from lib.common import case, finish, parse_arguments
from torch import Tensor

from realhf.algorithms.responses import response_logprobs, response_tokens
from realhf.api.experiment import OptimizerConfig
from realhf.api.generation import GenerationOptions
from realhf.architecture.model import DecoderConfig
from realhf.dataflow.graph import GENERATE, TRAIN_STEP, ModelFunctionCallDef, ModelInterfaceType
from realhf.dataflow.interface import InterfaceConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.interface import GenerationRequest, Stats
from realhf.engine.model import ShardedModel
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.parallel.groups import ParallelGroups
from realhf.parallel.vocabulary import Logits
from realhf.planning.model.call import CallModel, features_during
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.features import ENGINE
from realhf.planning.model.timings import ProfiledTimings
from realhf.planning.model.workload import Workload
from realhf.profiling.job import ProfileJob, ProfileTarget
from realhf.profiling.model_bench import Stopwatch
from realhf.profiling.profiler import Profiler
from realhf.worker.allocator import keep_freed_memory

SEQUENCES, PROMPT, RESPONSE, MINI_BATCHES = 32, 32, 64, 4
TARGET = 0.15  # by how much a measured time may differ from the predicted one
CPU = torch.device("cpu")
MODEL = DecoderConfig(
    hidden_size=256, intermediate_size=688, num_layers=4, num_heads=4, num_kv_heads=4, vocab_size=2048
)


def main() -> None:
    arguments = parse_arguments(__doc__)
    keep_freed_memory()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        timings = profiled(Path(folder), quick=arguments.quick)
        dist.destroy_process_group()
    share = Share()
    works: dict[str, tuple[Callable[[], object], float]] = {
        f"generation, {group} responses to a prompt": (
            lambda group=group: share.generate(group),
            predicted(GENERATE, timings, group),
        )
        for group in (1, 8, SEQUENCES)
    }
    works["training, four optimizer steps"] = share.train, predicted(TRAIN_STEP, timings, 8)
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(3 if arguments.quick else 7):
        for name, (work, _) in works.items():
            start = time.process_time()
            work()
            taken[name].append(time.process_time() - start)
    results = []
    for name, (_, expected) in works.items():
        measured = statistics.median(taken[name][1:])
        ratio = measured / expected
        holds = abs(ratio - 1) <= TARGET
        results.append(case(name, measured, "s", baseline=expected, ratio=ratio, target=1 + TARGET, holds=holds))
    finish("groups", results, arguments.json)


def profiled(folder: Path, *, quick: bool) -> ProfiledTimings:
    """The profile of the model, in processor time."""
    job = ProfileJob(
        hardware="cpu",
        targets=(ProfileTarget(model=MODEL, dtype="float32", path=""),),
        num_workers=1,
        batch_size=SEQUENCES,
        sequence_length=PROMPT + RESPONSE,
        length_spread=0,
        max_tokens=1024 if quick else 4096,
        max_sequences=SEQUENCES,
        repetitions=3 if quick else 5,
        timeout_s=900.0,
    )
    (folder / "round_trip").mkdir(mode=0o700)
    profiler = Profiler(job, 0, CPU, folder / "round_trip", lambda _: None)
    profiler.watch = Stopwatch(CPU, job.repetitions, time.process_time)
    return ProfiledTimings.of(profiler.profiles()[0], load_hardware("cpu"))


def predicted(kind: ModelInterfaceType, timings: ProfiledTimings, group: int) -> float:
    """Seconds of a call on one device."""
    mini_batches = MINI_BATCHES if kind is TRAIN_STEP else 1
    call = ModelFunctionCallDef(
        model_name="actor",
        model_type=MODEL,
        interface_type=kind,
        interface_impl=InterfaceConfig(),
        input_data=["prompt"],
        mini_batches=mini_batches,
    )
    lengths = Workload(prompt_tokens=PROMPT, new_tokens=RESPONSE, samples_per_prompt=group)
    model = CallModel(
        call=call,
        samples=SEQUENCES // mini_batches,
        lengths=lengths,
        dtype="float32",
        features=features_during(call, lengths, ENGINE.on(timings.hardware)),
        timings=timings,
        cluster=Cluster(devices_per_node=1, hardware=timings.hardware),
        hardware=timings.hardware,
    )
    return model.seconds(ParallelStrategy(), 1)


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
