"""The devices of the workers on this machine, and how each worker is told its own."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from realhf.base.errors import UserError
from realhf.machine.gpus import FOR_THE_CPU, VISIBLE, Gpu, visible_gpus
from realhf.machine.torch_build import torch_cuda_version

# The device that a launcher names to a worker: "cuda" or "cpu", and its number among the run's devices on the machine,
# as in "cuda:1". CUDA shows a worker no other GPU than that one, whatever its number.
DEVICE_VARIABLE = "REALHF_DEVICE"
WITHOUT_GPU = {VISIBLE: ""}


@dataclass(frozen=True)
class Device:
    """The device of one worker, and its environment. `place`: a GPU's UUID, or the number of a share of the CPU."""

    place: str
    environment: dict[str, str]


def devices_of(gpus: Sequence[Gpu], avoided: Collection[str] = ()) -> Iterator[Device]:
    """A device for each GPU; without GPUs shares of the CPU, endlessly. Places to be avoided are left out."""
    named = ((gpu.uuid, gpu.token) for gpu in gpus) if gpus else ((str(i), "") for i in count())
    kind = "cuda" if gpus else "cpu"
    for i, (place, visible) in enumerate(named):
        if place not in avoided:
            yield Device(place, {VISIBLE: visible, DEVICE_VARIABLE: f"{kind}:{i}"})


def gpus_for(num_workers: int, avoided: Collection[str] = ()) -> tuple[Gpu, ...]:
    """The visible GPUs, one for each of these workers; none: they compute on the CPU.

    Raises:
        UserError: there are fewer GPUs than workers, or torch cannot use them; or as `visible_gpus`.
    """
    gpus = visible_gpus()
    if not gpus:
        return ()
    if torch_cuda_version() is None:
        raise UserError(
            f"this machine has {in_words(gpus)}, but the installed torch was not built for CUDA; install a build that "
            f"was (https://pytorch.org), or {FOR_THE_CPU}"
        )
    usable = [gpu for gpu in gpus if gpu.uuid not in avoided]
    if num_workers > len(usable):
        without = "" if len(usable) == len(gpus) else f", without {', '.join(avoided)} after failures there"
        raise UserError(
            f"{num_workers} workers need a GPU each, and there is {in_words(usable) or 'none'}{without}; give "
            f"--num-workers {len(usable) or 1}, or {FOR_THE_CPU}"
        )
    return gpus


def in_words(gpus: Sequence[Gpu]) -> str:
    """`2 x NVIDIA H100 80GB HBM3`; empty without GPUs. They are of one kind."""
    return f"{len(gpus)} x {gpus[0].name}" if gpus else ""
