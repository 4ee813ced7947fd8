"""Hidden states between pipeline stages, and the 1F1B schedule.

All stages of a data-parallel index hold the same batch, so each side knows the shape of every
message, though micro-batches differ: none is sent along.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.api.errors import RunError
from realhf.parallel.groups import ParallelGroups


@dataclass(frozen=True)
class _Send:
    work: dist.Work
    tensor: Tensor  # must outlive the send
    peer: int


class Neighbours:
    """The links of one pipeline stage to the previous and the next one.

    Every wait ends after `timeout_s` with a RunError. Sends are not waited for at once; `flush` waits for the rest
    and ends every schedule.
    """

    def __init__(self, groups: ParallelGroups, hidden_size: int, like: Tensor, timeout_s: float):
        """`like` has the dtype and the device of hidden states."""
        self.groups, self.hidden_size, self.like = groups, hidden_size, like
        self.timeout_s = timeout_s
        self._sends: deque[_Send] = deque()

    def exchange_previous(self, send: Tensor | None = None, receive_tokens: int | None = None) -> Tensor | None:
        """Sends a tensor to the previous stage, receives [receive_tokens, hidden] from it; None on the first."""
        return None if self.groups.is_first_stage else self._exchange(self.groups.stage - 1, send, receive_tokens)

    def exchange_next(self, send: Tensor | None = None, receive_tokens: int | None = None) -> Tensor | None:
        """Sends a tensor to the next stage, receives [receive_tokens, hidden] from it; None on the last."""
        return None if self.groups.is_last_stage else self._exchange(self.groups.stage + 1, send, receive_tokens)

    def flush(self) -> None:
        """Returns once every send is done."""
        while self._sends:
            self._finish_oldest_send()

    def _exchange(self, stage: int, send: Tensor | None, receive_tokens: int | None) -> Tensor | None:
        peer = self.groups.stage_rank(stage)
        group = self.groups.pipeline
        operations = []
        received = None
        if send is not None and not send.numel():
            send = None  # both sides know that there is nothing to say
        if send is not None:
            send = send.detach().contiguous()
            operations.append(dist.P2POp(dist.isend, send, peer, group))
        if receive_tokens is not None:
            received = self.like.new_empty(receive_tokens, self.hidden_size)
        if receive_tokens:
            operations.append(dist.P2POp(dist.irecv, received, peer, group))
        if not operations:
            return received
        # Both directions are posted together: posted one after the other they could wait for each
        # other on backends that run the messages of a pair in order.
        works = dist.batch_isend_irecv(operations)
        if receive_tokens:
            self._wait(works[-1], peer, "a message from")
        if send is not None:
            self._sends.append(_Send(works[0], send, peer))
            # A peer lags by at most one pass through the pipeline in 1F1B, so an older send is done;
            # in a forward-only schedule this holds back a stage that runs ahead.
            if len(self._sends) > 2 * self.groups.layout.strategy.pp:
                self._finish_oldest_send()
        return received

    def _finish_oldest_send(self) -> None:
        send = self._sends.popleft()
        self._wait(send.work, send.peer, "the delivery of a message to")

    def _wait(self, work: dist.Work, peer: int, what: str) -> None:
        try:
            work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise RunError(
                f"rank {self.groups.rank} (pipeline stage {self.groups.stage}) waited for {what} rank {peer}, "
                f"at most {self.timeout_s:g} s: {error}"
            ) from error


def forward_schedule(
    neighbours: Neighbours, token_counts: Sequence[int], forward: Callable[[int, Tensor | None], Tensor]
) -> None:
    """Runs all micro-batches through this stage, in order.

    `forward(i, hidden)` runs micro-batch i, of `token_counts[i]` tokens, on what the previous stage
    sent (None on the first stage) and returns what the next stage gets (ignored on the last).
    """
    for i, tokens in enumerate(token_counts):
        neighbours.exchange_next(send=forward(i, neighbours.exchange_previous(receive_tokens=tokens)))
    neighbours.flush()


def one_forward_one_backward(
    neighbours: Neighbours, token_counts: Sequence[int], forward: Callable[[int, Tensor | None], Tensor]
) -> None:
    """Runs forward and backward of all micro-batches (PipeDream-Flush; Megatron-LM 2021, section 2.2).

    As `forward_schedule`, but `forward` builds a graph and returns the scalar loss on the last
    stage. At most as many graphs live as there are stages from this one on.
    """
    groups = neighbours.groups
    count = len(token_counts)
    warmup = min(count, groups.layout.strategy.pp - 1 - groups.stage)
    graphs: deque[tuple[Tensor | None, Tensor]] = deque()

    def run_forward(i: int, hidden: Tensor | None) -> Tensor:
        if hidden is not None:
            hidden.requires_grad_(True)
        output = forward(i, hidden)
        graphs.append((hidden, output))
        return output

    def run_backward(gradient: Tensor | None) -> Tensor | None:
        hidden, output = graphs.popleft()
        torch.autograd.backward(output, gradient)
        return None if hidden is None else hidden.grad

    for i in range(warmup):
        hidden = neighbours.exchange_previous(receive_tokens=token_counts[i])
        neighbours.exchange_next(send=run_forward(i, hidden))
    hidden = neighbours.exchange_previous(receive_tokens=token_counts[warmup]) if warmup < count else None
    for i in range(warmup, count):
        output = run_forward(i, hidden)
        gradient = run_backward(neighbours.exchange_next(send=output, receive_tokens=token_counts[i - warmup]))
        upcoming = token_counts[i + 1] if i + 1 < count else None
        hidden = neighbours.exchange_previous(send=gradient, receive_tokens=upcoming)
    for i in range(count - warmup, count):
        gradient = run_backward(neighbours.exchange_next(receive_tokens=token_counts[i]))
        neighbours.exchange_previous(send=gradient)
    neighbours.flush()
