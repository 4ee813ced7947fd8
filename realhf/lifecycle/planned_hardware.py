"""What is said of the hardware that a run was planned for, before it starts."""

from pathlib import Path

from realhf.dataflow.plan import load_plan
from realhf.machine.host import read_host
from realhf.planning.clusters import hardware_text
from realhf.planning.model.hardware import GIB
from realhf.rundir.run import Run


def said_of_hardware(run: Run, given: Path | None) -> list[str]:
    """What the run is planned for, and warnings: that it counts on more memory than there is; that the plan in the file
    `given` comes from elsewhere, or needs more memory than the devices have."""
    hardware, workers = run.spec.hardware, run.spec.num_workers
    if hardware is None:
        return []
    per_node = run.spec.devices_per_node
    lines = [f"planned for {hardware_text(hardware, workers // per_node, per_node)}"]
    there, each = read_host().memory_bytes / GIB, hardware.device_memory_bytes / GIB
    if hardware.host_cores is not None and workers * each > there:
        lines.append(
            f"warning: {workers} workers with {each:.1f} GiB each count on more than this machine's {there:.1f}"
        )
    made_for = load_plan(given).notes.get("hardware", hardware.name) if given else hardware.name
    if made_for != hardware.name:
        lines.append(f"note: {given} was made for {made_for}; its times and memory are predicted anew")
    needs = [memory.peak_bytes / GIB for memory in run.plan.rationale.memory] if run.plan.rationale else []
    if given and max(needs, default=0) > each:
        lines.append(f"warning: {given} needs {max(needs):.1f} GiB on a device, and they have {each:.1f} GiB")
    return lines
