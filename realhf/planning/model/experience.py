"""What finished runs measured of their calls, kept beside the profile that predicted them, and what that says of the
next run's."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from realhf.base.files import decode_json, read_bytes, read_file, write_atomically
from realhf.base.numbers import SECONDS, check_fields
from realhf.planning.model.uncertainty import SPREAD

KEPT_RUNS = 32  # for each profile; older ones are removed
# A call's error is in equal parts that of all calls of a run (the machine), of the call under every plan (its
# workload), and of the call in this layout. The first cancels where plans are compared, the second mostly.
ERROR_PARTS = 3
_LEAST_NOISE = 1e-3  # assumed of a median


class SeenCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call of a run: its interface type, the option that it ran under (`option_text`), the logarithm of its measured
    over its predicted seconds, and the standard deviation of that (of the median over steps)."""

    interface: str
    option: str
    log_ratio: float
    noise: float

    def __post_init__(self) -> None:
        check_fields("", self, {"log_ratio": (-SECONDS[1], SECONDS[1]), "noise": SPREAD})


class RunTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calls of one run that one profile predicted. `profile`: the digest of that profile's file."""

    run: str
    profile: str
    calls: tuple[SeenCall, ...]
    format: Literal["run-times/1"] = "run-times/1"


@dataclass(frozen=True)
class CallError:
    """What is expected of log(measured / predicted) of a call under an option: its mean, and what it varies by with the
    machine during the run, with the call under every option, and with this option (standard deviations)."""

    mean: float
    run: float
    call: float
    option: float


def digest_of(profile: Path) -> str:
    """SHA-256, in hexadecimal, of a profile's file."""
    return hashlib.sha256(read_bytes(profile)).hexdigest()


def runs_folder(profile: Path) -> Path:
    """The folder of the runs that a profile predicted."""
    return profile.with_suffix(".runs")


def load_runs(profile: Path) -> tuple[RunTimes, ...]:
    """The runs that this very profile predicted; of a profile that was measured again, none. Raises UserError for a
    broken file."""
    folder = runs_folder(profile)
    if not folder.is_dir():
        return ()
    digest = digest_of(profile)
    runs = [load_run_times(path) for path in sorted(folder.glob("*.json"))]
    return tuple(run for run in runs if run.profile == digest)


def load_run_times(path: Path) -> RunTimes:
    """Reads one run's file. Raises UserError if it cannot be read; the text names the field."""
    return read_file(path, lambda data: decode_json(data, RunTimes), "file of a run's times", "remove it")


def save_run_times(times: RunTimes, profile: Path) -> Path:
    """Writes a run's times atomically beside the profile, in place of what the run has left before, and removes the
    oldest files beyond KEPT_RUNS. Returns the path."""
    folder = runs_folder(profile)
    folder.mkdir(exist_ok=True)
    path = folder / f"{hashlib.sha256(times.run.encode()).hexdigest()[:16]}.json"
    write_atomically(path, msgspec.json.format(msgspec.json.encode(times), indent=1) + b"\n")
    by_age = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
    for old in by_age[:-KEPT_RUNS]:
        old.unlink(missing_ok=True)
    return path


def expected(runs: Sequence[RunTimes], interface: str, option: str, sigma: float) -> CallError:
    """Of a call under an option, if a call's error is `sigma` (standard deviation) before anything was seen.

    What a run measured of a call is the sum of three parts: the run's, that of the call under every option, and the
    option's. All are normal with the same variance beforehand, and all runs together say what they are
    (`realhf.planning.model.gaussian.observed`): calls of a run that are slow alike tell of the machine.
    """
    part = sigma / math.sqrt(ERROR_PARTS)
    seen = [(number, call) for number, run in enumerate(runs) for call in run.calls]
    if not sigma or all(call.interface != interface for _, call in seen):
        return CallError(0.0, part, part, part)
    import numpy as np  # takes long to import

    from realhf.planning.model.gaussian import observed

    keys: dict[object, int] = {interface: 0, (interface, option): 1}  # the parts that are asked for come first
    rows = [(("run", number), call.interface, (call.interface, call.option)) for number, call in seen]
    for key in (key for row in rows for key in row):
        keys.setdefault(key, len(keys))
    weights = np.zeros((len(rows), len(keys)))
    for number, row in enumerate(rows):
        weights[number, [keys[key] for key in row]] = 1.0
    mean, covariance = observed(
        np.zeros(len(keys)),
        np.eye(len(keys)) * part**2,
        weights,
        np.array([call.log_ratio for _, call in seen]),
        np.array([max(call.noise, _LEAST_NOISE) for _, call in seen]),
    )
    # As two independent parts: what goes with the call's, and what is left of the option's beside it.
    of_call, of_option, together = covariance[0, 0], covariance[1, 1], covariance[0, 1]
    call_error = math.sqrt(of_call) + together / math.sqrt(of_call)
    rest = math.sqrt(max(of_option - together**2 / of_call, 0.0))
    return CallError(float(mean[0] + mean[1]), part, float(call_error), rest)
