"""One worker's calls on a small Llama: profiled in processor time, and predicted, in the same process."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from realhf.architecture.model import DecoderConfig
from realhf.dataflow.graph import ModelFunctionCallDef, ModelInterfaceType
from realhf.dataflow.interface import InterfaceConfig
from realhf.geometry.layout import ParallelStrategy
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

CPU = torch.device("cpu")
MODEL = DecoderConfig(
    hidden_size=256, intermediate_size=688, num_layers=4, num_heads=4, num_kv_heads=4, vocab_size=2048
)


def profiled(*, sequences: int, sequence_length: int, max_tokens: int, repetitions: int) -> ProfiledTimings:
    """The profile of `MODEL` for batches of so many sequences of that length, in processor time of one thread."""
    keep_freed_memory()
    torch.set_num_threads(1)
    job = ProfileJob(
        hardware="cpu",
        targets=(ProfileTarget(model=MODEL, dtype="float32", path=""),),
        num_workers=1,
        batch_size=sequences,
        sequence_length=sequence_length,
        length_spread=0,
        max_tokens=max_tokens,
        max_sequences=sequences,
        repetitions=repetitions,
        timeout_s=900.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        round_trip = Path(folder, "round_trip")
        round_trip.mkdir(mode=0o700)
        profiler = Profiler(job, 0, CPU, round_trip, lambda _: None)
        profiler.watch = Stopwatch(CPU, job.repetitions, time.process_time)
        found = ProfiledTimings.of(profiler.profiles()[0], load_hardware("cpu"))
        dist.destroy_process_group()
    return found


def predicted(
    kind: ModelInterfaceType, timings: ProfiledTimings, lengths: Workload, samples: int, mini_batches: int = 1
) -> float:
    """Seconds of a call of `samples` sequences on one device."""
    call = ModelFunctionCallDef(
        model_name="actor",
        model_type=MODEL,
        interface_type=kind,
        interface_impl=InterfaceConfig(),
        input_data=["prompt"],
        mini_batches=mini_batches,
    )
    model = CallModel(
        call=call,
        samples=samples // mini_batches,
        lengths=lengths,
        dtype="float32",
        features=features_during(call, lengths, ENGINE.on(timings.hardware)),
        timings=timings,
        cluster=Cluster(devices_per_node=1, hardware=timings.hardware),
        hardware=timings.hardware,
    )
    return model.seconds(ParallelStrategy(), 1)


def processor_s(work: Callable[[], object]) -> float:
    """Seconds of this process's processor that `work` takes."""
    start = time.process_time()
    work()
    return time.process_time() - start
