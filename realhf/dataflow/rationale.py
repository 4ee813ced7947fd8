"""Why a run has the plan it has: what the planner knew, kept in `plan.json` for people and for the report."""

import msgspec


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Predicted bytes on each of the neighbouring devices (first, number): what stays there, and the most at once;
    communicators are among what stays."""

    devices: tuple[int, int]
    static_bytes: int
    peak_bytes: int
    communicator_bytes: int = 0


class Instead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The best other layout of one call, all other calls as they are; `layout` is empty where no other fits.

    `slower_by` is what a step would take longer, as a part of the plan's.
    """

    call: str
    layout: str
    slower_by: float = 0.0
    num_too_large: int
    num_others: int


class Rationale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the planner knew of a plan when the run began.

    `certificate` says in words how far from the best a searched plan can be, `limits` what would have to become
    faster. `heuristic_step_s` is a step of the plan that treats all calls alike on all devices, None where none is
    legal; it may need more memory than there is (`heuristic_fits`).
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

    def memory_of(self, device: int) -> DeviceMemory | None:
        """The prediction for one device, None where there is none."""
        return next((m for m in self.memory if m.devices[0] <= device < sum(m.devices)), None)
