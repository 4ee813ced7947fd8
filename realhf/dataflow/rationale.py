"""Why a run has its plan: the planner's knowledge, kept in `plan.json` for people and for the report."""

import msgspec

SAME = 5e-4  # relative differences below it are not worth a number


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Predicted bytes on each of the consecutive `devices` (first, number): those that stay, communicators among them,
    and the peak."""

    devices: tuple[int, int]
    static_bytes: int
    peak_bytes: int
    communicator_bytes: int = 0


class Instead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The best other layout of one call if all other calls stay; `layout` is empty if no other fits.

    `slower_by` is the longer time of a step, relative to the plan's.
    """

    call: str
    layout: str
    slower_by: float = 0.0
    num_too_large: int
    num_others: int


class Worth(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gain of a feature of the plan: `without_s` is a step of the best plan found that lacks it, as the plan is
    otherwise; None: no such plan fits into memory. `of` names a call, or a model that waits in host memory."""

    of: str
    feature: str
    without_s: float | None


class Rationale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The planner's knowledge of a plan when the run began.

    certificate: in words, how far from the best a searched plan can be.
    limits: in words, what would have to become faster.
    heuristic_step_s: a step of the plan that treats all calls alike on all devices; None if none is legal.
    heuristic_fits: whether that plan fits into memory.
    worth: of each choice that the plan made of how calls compute.
    preemptions: by name of each generate call whose KV cache has no room for all sequences: how often one loses its
        place in a step, expected of a data-parallel rank.
    """

    origin: str
    hardware: str
    profiled: bool
    certificate: str
    limits: str
    heuristic_step_s: float | None
    heuristic_fits: bool
    device_memory_bytes: int
    memory: tuple[DeviceMemory, ...]
    instead: tuple[Instead, ...]
    worth: tuple[Worth, ...] = ()
    preemptions: dict[str, float] = {}

    def memory_of(self, device: int) -> DeviceMemory | None:
        """The prediction for one device, None if there is none."""
        return next((m for m in self.memory if m.devices[0] <= device < sum(m.devices)), None)


def slower_text(share: float) -> str:
    """For tables: `+25.0%`, or `the same`; `share` of the plan's step by which another is slower."""
    return "the same" if abs(share) < SAME else f"{share:+.1%}"
