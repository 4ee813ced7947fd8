"""The results of a step's calls, by the digests that workers reply with: the same under every layout."""

import hashlib
from collections.abc import Sequence

import numpy as np

from realhf.master.loop import CallRecord
from realhf.master.records import statistics
from realhf.rundir.outputs import DIGEST_BYTES, SAMPLE, CallOutputs, KeyOutputs, StepOutputs


def step_outputs(step: int, records: Sequence[CallRecord]) -> StepOutputs:
    """A line of `outputs.jsonl`."""
    calls = {}
    for record, (call, stats) in zip(records, statistics(records).items(), strict=True):
        keys = sorted({key for reply in record.replies.values() for key in reply.outputs})
        if keys or stats:
            made = {key: _outputs(record, key) for key in keys}
            calls[call] = CallOutputs(keys=made, statistics=tuple(stats))
    return StepOutputs(step=step, calls=calls)


def _outputs(record: CallRecord, key: str) -> KeyOutputs:
    """Of a sample that several workers have made: that of the first one."""
    columns = [reply.outputs[key] for _, reply in sorted(record.replies.items()) if key in reply.outputs]
    made: dict[int, tuple[int, bytes]] = {}
    for column in columns:
        digests = (column.digests[i : i + DIGEST_BYTES] for i in range(0, len(column.digests), DIGEST_BYTES))
        for sample, length, digest in zip(column.ids, column.lengths, digests, strict=True):
            made.setdefault(sample, (length, digest))
    in_order = [made[sample] for sample in sorted(made)]
    table = np.array([(length, int.from_bytes(digest[:4], "little")) for length, digest in in_order], SAMPLE)
    whole = hashlib.blake2b(b"".join(digest for _, digest in in_order), digest_size=8).hexdigest()
    return KeyOutputs(dtype=columns[0].dtype, digest=whole, samples=table.tobytes())
