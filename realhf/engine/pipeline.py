"""Messages of hidden states between pipeline stages, and the execution of a schedule of passes.

All stages of a data-parallel index hold the same batch, so each side knows the shape of every
message, though micro-batches differ: none is sent along.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.base.errors import RunError
from realhf.geometry.pipeline_schedule import Pass, Step, forward_steps, training_steps
from realhf.parallel.groups import ParallelGroups


@dataclass(frozen=True)
class Transfer:
    """A message under way; `work` is None where it is empty, as both sides know."""

    tensor: Tensor  # must outlive a send
    peer: int
    work: dist.Work | None = None


class Neighbours:
    """The links of one pipeline stage to the others.

    Every wait ends after `timeout_s` with a RunError. Sends are not waited for at once; `flush` waits for the rest
    and ends every schedule.
    """

    def __init__(self, groups: ParallelGroups, hidden_size: int, like: Tensor, timeout_s: float):
        """`like` has the dtype and the device of hidden states."""
        self.groups, self.hidden_size, self.like = groups, hidden_size, like
        self.timeout_s = timeout_s
        self._sends: deque[Transfer] = deque()

    def receive(self, stage: int, tokens: int) -> Transfer:
        """Asks for [tokens, hidden] from `stage`; `take` waits for it."""
        peer = self.groups.stage_rank(stage)
        received = self.like.new_empty(tokens, self.hidden_size)
        return Transfer(received, peer, dist.irecv(received, peer, self.groups.pipeline) if tokens else None)

    def take(self, transfer: Transfer) -> Tensor:
        """Waits for the received tensor, and returns it."""
        self._wait(transfer, "a message from")
        return transfer.tensor

    def send(self, stage: int, tensor: Tensor) -> None:
        """Sends [tokens, hidden] to `stage`."""
        if not tensor.numel():
            return
        peer, tensor = self.groups.stage_rank(stage), tensor.detach().contiguous()
        self._sends.append(Transfer(tensor, peer, dist.isend(tensor, peer, self.groups.pipeline)))
        # A peer lags by at most one pass through the pipeline in 1F1B, so an older send is done;
        # in a forward-only schedule this holds back a stage that runs ahead.
        if len(self._sends) > 2 * self.groups.layout.strategy.pp:
            self._finish_oldest_send()

    def flush(self) -> None:
        """Returns once every send is done."""
        while self._sends:
            self._finish_oldest_send()

    def _finish_oldest_send(self) -> None:
        self._wait(self._sends.popleft(), "the delivery of a message to")

    def _wait(self, transfer: Transfer, what: str) -> None:
        if transfer.work is None:
            return
        groups, peer = self.groups, transfer.peer

        def who() -> str:  # outlives the message, and must not hold its tensor
            return f"rank {groups.rank} (pipeline stage {groups.stage}) waited for {what} rank {peer}"

        try:
            self.groups.waits.wait(transfer.work, self.timeout_s, who)
        except RuntimeError as error:
            raise RunError(f"{who()}, at most {self.timeout_s:g} s: {error}") from error


# (pass, its input: hidden states or gradients, None where no stage sends any) -> the input of the next stage.
Compute = Callable[[Pass, Tensor | None], Tensor | None]
EndPass = Callable[[], None]


def no_end() -> None:
    """The end of a pass where no rank needs another for its parameters."""


def run_steps(
    neighbours: Neighbours, steps: Sequence[Step], token_counts: Sequence[int], compute: Compute, end_pass: EndPass
) -> None:
    """Runs a stage's steps; micro-batch i has `token_counts[i]` tokens. `end_pass` is called after each."""
    awaited: dict[Pass, Transfer] = {}
    for step in steps:
        for message in step.receives:
            tokens = token_counts[message.target.micro_batch]
            awaited[message.target] = neighbours.receive(message.sender, tokens)
        received = awaited.pop(step.run, None)
        output = compute(step.run, None if received is None else neighbours.take(received))
        if step.send is not None:
            assert output is not None, f"{step.run} gives nothing to send"
            neighbours.send(step.send.receiver, output)
        end_pass()
    neighbours.flush()


def run_forward(
    neighbours: Neighbours, token_counts: Sequence[int], forward: Compute, end_pass: EndPass = no_end
) -> None:
    """Runs all micro-batches through this stage's chunks.

    `forward(run, hidden)` gets the output of the virtual stage before (None on the first) and returns the input of the
    next one (None on the last).
    """
    strategy, stage = neighbours.groups.layout.strategy, neighbours.groups.stage
    steps = forward_steps(strategy.pp, strategy.chunks, len(token_counts))[stage]
    run_steps(neighbours, steps, token_counts, forward, end_pass)


def run_training(
    neighbours: Neighbours,
    token_counts: Sequence[int],
    forward: Callable[[Pass, Tensor | None], Tensor],
    end_pass: EndPass = no_end,
    end_backward: Callable[[int], None] | None = None,
) -> None:
    """Runs forward and backward of all micro-batches.

    As `run_forward`, but `forward` builds a graph and returns the scalar loss on the last virtual stage.
    `end_backward` is called with the micro-batch after each backward pass; these come in the order of micro-batches.
    `realhf.geometry.pipeline_schedule.training_order` says how many graphs live at most.
    """
    strategy, stage = neighbours.groups.layout.strategy, neighbours.groups.stage
    graphs: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}

    def compute(run: Pass, received: Tensor | None) -> Tensor | None:
        key = run.chunk, run.micro_batch
        if run.is_forward:
            if received is not None:
                received.requires_grad_(True)
            graphs[key] = received, forward(run, received)
            return graphs[key][1]
        hidden, output = graphs.pop(key)
        torch.autograd.backward(output, received)
        if end_backward is not None:
            end_backward(run.micro_batch)
        return None if hidden is None else hidden.grad

    steps = training_steps(strategy.pp, strategy.chunks, len(token_counts))[stage]
    run_steps(neighbours, steps, token_counts, compute, end_pass)
