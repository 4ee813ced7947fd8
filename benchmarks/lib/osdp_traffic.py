"""What a plan of modes says that a device sends, to compare with what the engine counts."""

from realhf.planning.model.osdp.problem import OsdpPlan


def planned_sent_bytes(plan: OsdpPlan) -> float:
    """Bytes of a device in a step, each pass of S bytes around the ring S (N - 1) / N.

    The slice that the forward pass gathers last, two with prefetch, is still there when the backward pass begins.
    The solver leaves that out, since it hangs on which operators are sharded.
    """
    problem, passes, still_there = plan.problem, 0.0, 2 if plan.problem.prefetch else 1
    for op, mode, count in reversed(list(plan.counts())):
        slice_bytes = op.parameter_bytes / op.slices
        if mode != "sharded":
            passes += 2 * count * slice_bytes
            continue
        gathers = problem.gathers_of(op)
        kept = min(count, still_there) if gathers > 1 else 0
        still_there -= kept
        passes += ((gathers + 1) * count - kept) * slice_bytes
    return passes * (problem.links.num_devices - 1) / problem.links.num_devices
