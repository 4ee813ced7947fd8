"""Numbers that pages promise are those of the code."""

import importlib
from typing import Any

import pytest

from tests.docs.blocks import ROOT

MIB = 2**20
# A page, words of it, where the code has the number, and the number.
NUMBERS: list[tuple[str, str, str, float]] = [
    ("runs", "ends the run after 60 s of silence", "master.master:HEARTBEAT_TIMEOUT_S", 60),
    ("runs", "already, 3 s of silence", "master.master:SUSPICIOUS_SILENCE_S", 3),
    ("runs", "says every five seconds that it is there", "master.master:ALIVE_EVERY_S", 5),
    ("runs", "hears nothing of it for 90 s (`--master-timeout-s`", "rundir.run:RunSpec.master_timeout_s", 90),
    ("runs", "45 s before the first answer", "worker.__main__:CONNECT_S", 45),
    ("runs", "a quarter of a second", "master.clocks:TOLERATED_S", 0.25),
    ("runs", "sees no change for 60 s", "launch.supervisor:MASTER_SILENCE_S", 60),
    ("runs", "150 s where files may be seen late", "launch.supervisor:_FILES_LATE_S", 150 - 60),
    ("runs", "of each call's last ten times", "master.drift:WINDOW", 10),
    ("runs", "first step of a start does not count", "master.drift:WARM_UP", 1),
    ("runs", "than 1.5 times its prediction", "rundir.run:RunSpec.drift_threshold", 1.5),
    ("runs", "whose step is at least 5 % shorter", "lifecycle.replan:LEAST_GAIN", 0.05),
    ("runs", "20,000 plans by default", "lifecycle.replan:EVALUATIONS", 20_000),
    ("runs", "is to blame for two failures in a row", "lifecycle.shrink:FAILURES", 2),
    ("runs", "has written no status for a minute", "report.run_status:SILENCE_S", 60),
    ("runs", "the last five evaluations", "report.run_status:LAST_EVALUATIONS", 5),
    ("runs", "over the first ten and the last ten steps", "report.curves:TREND_STEPS", 10),
    ("runs", "writes three of each step", "rundir.run:RunSpec.samples", 3),
    ("runs", "A file of weights above 16 MiB", "base.digest:_SAMPLED_BYTES", 16 * MIB),
    ("data", "A parquet file above 256 MiB", "data.files.arrow:_IN_MEMORY_BYTES", 256 * MIB),
    ("rewards", "`concurrency` (1,024)", "rewards.pool:CONCURRENCY", 1024),
    ("rewards", "lists of at most 64 samples", "rewards.pool:BATCH_SAMPLES", 64),
    ("rewards", "reply, of at most 64 MiB", "rewards.server:_MAX_REPLY_BYTES", 64 * MIB),
    ("rewards", "at most 16 MiB a process", "rewards.driver:_MAX_OUTPUT_BYTES", 16 * MIB),
    ("reallocation", "at most a bucket, 64 MiB", "realloc.plan.planner:DEFAULT_BUCKET_BYTES", 64 * MIB),
    ("reallocation", "receives about 256 of them", "realloc.plan.parcels:PARCELS_OF_A_DEVICE", 256),
    ("cost_model", "16 MiB of shared memory in a worker of a pipeline", "architecture.chunks:RING_BYTES", 16 * MIB),
    ("reallocation", "into a ring of 1 MiB", "cpu.host_group:PARTS_RING_BYTES", MIB),
    ("reallocation", "of 512 KiB and more over gloo", "realloc.execute.carriers:MESSAGE_BYTES", MIB // 2),
    ("reallocation", "and 16 MiB over NCCL", "realloc.execute.carriers:NCCL_MESSAGE_BYTES", 16 * MIB),
    ("reallocation", "of every 100th step", "rundir.run:RunSpec.verify_reallocations_every", 100),
    ("engine", "the same eight tokens or more", "architecture.chunks:SHORTEST_SHARED", 8),
    ("gpu", "takes blocks of 64 MiB", "engine.residency.offload:LARGEST_BLOCK_BYTES", 64 * MIB),
]


def value_of(place: str) -> Any:
    """A module's constant, or the default of a field of one of its classes."""
    module, _, path = place.partition(":")
    found: Any = importlib.import_module(f"realhf.{module}")
    owner, _, field = path.partition(".")
    if not field:
        return getattr(found, owner)
    struct = getattr(found, owner)
    return dict(zip(reversed(struct.__struct_fields__), reversed(struct.__struct_defaults__), strict=False))[field]


@pytest.mark.parametrize(("page", "words", "place", "number"), NUMBERS, ids=[row[2] for row in NUMBERS])
def test_a_number_of_a_page_is_the_code_s(page: str, words: str, place: str, number: float) -> None:
    text = " ".join((ROOT / f"docs/{page}.md").read_text().split())
    assert words in text, f"docs/{page}.md no longer says it so: write the row anew"
    assert value_of(place) == number
