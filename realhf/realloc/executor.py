"""Carries out a reallocation plan: packs, sends, receives and unpacks, bucket by bucket, with a deadline."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.realloc.held import HeldBoxes, by_name, part, sent_part
from realhf.realloc.layout import Box
from realhf.realloc.planner import DeviceRound, ReallocationPlan


@dataclass(frozen=True)
class Message:
    """What this rank sends to or receives from `peer`, packed in `buffer`; `peers_part` of it is the peer's."""

    peers_part: Literal["send", "receive"]
    peer: int
    boxes: Sequence[Box]
    buffer: Tensor


class ReallocationError(RuntimeError):
    """A peer did not send or receive its part; the text names the model, the bucket, the peer and the parameters."""


def execute(
    plan: ReallocationPlan,
    rank: int,
    source: Sequence[tuple[Box, Tensor]],
    target: Sequence[tuple[Box, Tensor]],
    group: dist.ProcessGroup | None = None,
    *,
    eta: float = 1.0,
    model_name: str = "model",
    timeout_s: float = 600.0,
) -> None:
    """Fills the tensors of `target` from those of `source` on all ranks, each a view of the shape of its box.

    With `eta` < 1 the target becomes eta * source + (1 - eta) * target, an exponential moving average of the sources
    that it was given, as for a reference model that follows the actor; its own values are then needed before. Each
    time it is rounded to the tensors' dtype: in bfloat16 changes below 1/256 of a value are lost, so keep averages
    of small `eta` in float32.

    Every rank that holds source or target boxes calls it with the same plan, made from exactly these boxes; a
    device's index is its rank in `group` (default: the world). The others return at once. A target may be the
    same view as the source of that name (nothing is copied), but must not overlap the storage of a source otherwise.
    With NCCL all ranks of the group must have made one collective call in it before (a rule of batch_isend_irecv).
    Beyond the tensors it needs two buckets of memory: one to send, one to receive.

    Raises:
        ReallocationError: a peer did not answer within `timeout_s` for one bucket, or died.
        ValueError: the tensors are not all of one dtype, or not of the size that the plan counts with; `eta` is not
            from 0 to 1, or less than 1 with a plan that forwards.
    """
    write = _writer(plan, eta)
    with torch.no_grad():
        _check_dtype(plan, [tensor for _, tensor in (*source, *target)])
        source_tensors, target_tensors = by_name(source), by_name(target)
        for box in plan.local_copies.get(rank, ()):
            ours, wanted = part(source_tensors, box), part(target_tensors, box)
            if ours.data_ptr() != wanted.data_ptr() or ours.stride() != wanted.stride():
                write(wanted, ours)
        for each_round in plan.device_rounds.get(rank, ()):
            bucket = f"reallocation of {model_name}, bucket {each_round.index + 1} of {len(plan.rounds)}: rank {rank}"
            _run_round(each_round, source_tensors, target_tensors, write, group, bucket, timeout_s)


def _run_round(
    each_round: DeviceRound,
    source_tensors: HeldBoxes,
    target_tensors: HeldBoxes,
    write: Callable[[Tensor, Tensor], object],
    group: dist.ProcessGroup | None,
    bucket: str,
    timeout_s: float,
) -> None:
    """Posts all sends and receives of one round, then waits for all of them.

    A rank waits only for peers that are in the same or an earlier round, whatever the meshes, and has posted its own
    part of this round before it waits: by induction over the rounds nobody waits forever.
    """
    (_, like), *_ = next(iter((*source_tensors.values(), *target_tensors.values())))
    messages: list[Message] = []
    for peer, boxes in sorted(each_round.sends.items()):
        buffer = torch.empty(sum(box.size for box in boxes), dtype=like.dtype, device=like.device)
        _for_each_box(buffer, boxes, lambda box, packed: packed.copy_(sent_part(source_tensors, target_tensors, box)))
        messages.append(Message("receive", peer, boxes, buffer))
    for peer, boxes in sorted(each_round.receives.items()):
        buffer = torch.empty(sum(box.size for box in boxes), dtype=like.dtype, device=like.device)
        messages.append(Message("send", peer, boxes, buffer))
    exchange(messages, group, bucket, timeout_s)
    for message in messages:
        if message.peers_part == "send":
            _for_each_box(message.buffer, message.boxes, lambda box, packed: write(part(target_tensors, box), packed))


def exchange(messages: Sequence[Message], group: dist.ProcessGroup | None, label: str, timeout_s: float) -> None:
    """Posts all messages, then waits for all of them; `label` begins the text of an error.

    Raises:
        ReallocationError: a peer did not answer within `timeout_s`, or died.
    """
    if not messages:
        return
    deadline = time.monotonic() + timeout_s
    works = _post(messages, group, label)
    # Several messages have one work where the backend makes one call of them (NCCL).
    for index, work in enumerate(works):
        waited_for = messages if len(works) < len(messages) else [messages[index]]
        try:
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:
            waited_s = time.monotonic() - deadline + timeout_s
            raise ReallocationError(
                f"{label} waited {waited_s:.1f} s (at most {timeout_s:g}) in vain for {_names(waited_for)}: {error}"
            ) from error


def _post(messages: Sequence[Message], group: dist.ProcessGroup | None, label: str) -> list[Any]:
    group = group or dist.group.WORLD
    try:
        return dist.batch_isend_irecv(
            [
                # As bytes: the wire need not know the dtype.
                dist.P2POp(
                    dist.irecv if message.peers_part == "send" else dist.isend,
                    message.buffer.view(torch.uint8),
                    group=group,
                    group_peer=message.peer,
                )
                for message in messages
            ]
        )
    except RuntimeError as error:
        raise ReallocationError(f"{label} could not reach {_names(messages)}: {error}") from error


def _for_each_box(buffer: Tensor, boxes: Sequence[Box], action: Callable[[Box, Tensor], object]) -> None:
    """Calls `action` on every box and its place in the flat `buffer`, in the shape of the box."""
    start = 0
    for box in boxes:
        action(box, buffer[start : start + box.size].view(box.shape))
        start += box.size


def _names(messages: Sequence[Message]) -> str:
    """`rank 3 to send model.norm.weight and 4 more`, for every message."""
    texts = []
    for message in messages:
        names = list(dict.fromkeys(box.name for box in message.boxes))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        texts.append(f"rank {message.peer} to {message.peers_part} {names[0]}{more}")
    return ", ".join(texts)


def _writer(plan: ReallocationPlan, eta: float) -> Callable[[Tensor, Tensor], object]:
    """What is done with (a part of the target, its new values)."""
    if not 0 <= eta <= 1:
        raise ValueError(f"eta={eta:g} is the weight of the source in an average; give a number from 0 to 1")
    if eta == 1:
        return Tensor.copy_
    if any(transfer.is_forwarded for transfer in plan.transfers):
        raise ValueError(
            f"eta={eta:g} with a plan that forwards: a device would send on averages instead of the source's values; "
            "plan with forwarding=False"
        )
    return lambda target, values: target.lerp_(values, eta)


def _check_dtype(plan: ReallocationPlan, tensors: Sequence[Tensor]) -> None:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise ValueError(f"a reallocation moves tensors of one dtype, not of {sorted(map(str, dtypes))}; split it")
    if tensors and tensors[0].element_size() != plan.element_bytes:
        raise ValueError(
            f"the plan counts {plan.element_bytes} bytes an element, {tensors[0].dtype} has "
            f"{tensors[0].element_size()}; plan with element_bytes={tensors[0].element_size()}"
        )
