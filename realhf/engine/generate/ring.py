"""Batches that are generated in a ring over the pipeline stages: hidden states go down, tokens come back."""

from collections import deque
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.base.errors import RunError
from realhf.engine.generate.running_batch import RunningBatch
from realhf.parallel.groups import ParallelGroups
from realhf.parallel.waiting import Waits


@dataclass(frozen=True)
class _Message:
    """A tensor on its way; `what` says for an error what was waited for and on whom."""

    tensor: Tensor
    work: dist.Work
    what: str
    timeout_s: float
    waits: Waits

    def wait(self) -> Tensor:
        try:
            self.waits.wait(self.work, self.timeout_s, partial("generate: {}".format, self.what))  # not its tensor
        except RuntimeError as error:
            raise RunError(f"generate: {self.what} (deadline {self.timeout_s:g} s): {error}") from error
        return self.tensor


class _Links:
    """Point-to-point messages between the stages of one pipeline, by global rank."""

    def __init__(self, groups: ParallelGroups, timeout_s: float):
        self.groups, self.timeout_s = groups, timeout_s

    def send(self, tensor: Tensor, stage: int, name: str) -> _Message:
        peer, tensor = self.groups.stage_rank(stage), tensor.contiguous()
        what = f"rank {self.groups.rank} waited for rank {peer} to take {name}"
        return self._message(tensor, dist.isend(tensor, peer, self.groups.pipeline), what)

    def receive(self, tensor: Tensor, stage: int, name: str) -> _Message:
        peer = self.groups.stage_rank(stage)
        what = f"rank {self.groups.rank} waited for {name} from rank {peer}"
        return self._message(tensor, dist.irecv(tensor, peer, self.groups.pipeline), what)

    def _message(self, tensor: Tensor, work: dist.Work | None, what: str) -> _Message:
        assert work is not None, "this rank is in the pipeline"
        return _Message(tensor, work, what, self.timeout_s, self.groups.waits)


class _InFlight:
    """A batch and the messages about it: under way, and awaited from the previous and the last stage."""

    def __init__(self, batch: RunningBatch):
        self.batch = batch
        self.sent: list[_Message] = []
        self.incoming: _Message | None = None
        self.awaits_tokens = False

    def await_sent(self) -> None:
        for message in self.sent:
            message.wait()
        self.sent.clear()


class Ring:
    """Takes batches to their ends, all of them in flight at once: one a stage keeps all stages busy.

    Every stage takes the batches in one order, sends without waiting, and the two ends of a pair of
    ranks post their messages in one order.
    """

    def __init__(self, groups: ParallelGroups, batches: list[RunningBatch], hidden_like: Tensor, timeout_s: float):
        """`hidden_like` [0, hidden] has the dtype and device of hidden states."""
        self.groups, self.hidden_like = groups, hidden_like
        self.links = _Links(groups, timeout_s)
        self.all = [_InFlight(batch) for batch in batches]
        self.last = groups.layout.strategy.pp - 1

    def run(self) -> None:
        in_flight = deque(self.all)
        for entry in self.all:
            self._plan(entry)
        while in_flight:
            entry = in_flight.popleft()
            if entry.awaits_tokens and not self._accept(entry, self._receive_tokens(entry)):
                continue
            out = entry.batch.compute(None if entry.incoming is None else entry.incoming.wait())
            if not self.groups.is_last_stage:
                self._send_hidden(entry, out)
            elif not self._accept(entry, self._choose(entry, out)):
                continue
            in_flight.append(entry)
        for entry in self.all:
            entry.await_sent()

    def _accept(self, entry: _InFlight, tokens: Tensor) -> bool:
        """Gives the batch its tokens; False if that was its last step."""
        entry.batch.accept(tokens)
        if entry.batch.is_done:
            return False
        self._plan(entry)
        return True

    def _plan(self, entry: _InFlight) -> None:
        """Plans the next step, and posts the receive of its hidden states now that their shape is known."""
        step = entry.batch.plan()
        if not self.groups.is_first_stage:
            hidden = self.hidden_like.new_empty(step.rows, self.hidden_like.shape[1])
            what = f"the hidden states of decode step {entry.batch.steps}"
            entry.incoming = self.links.receive(hidden, self.groups.stage - 1, what)

    def _send_hidden(self, entry: _InFlight, hidden: Tensor) -> None:
        what = f"the hidden states of decode step {entry.batch.steps}"
        entry.sent.append(self.links.send(hidden, self.groups.stage + 1, what))
        entry.awaits_tokens = True

    def _choose(self, entry: _InFlight, logits: Tensor) -> Tensor:
        entry.await_sent()  # the last step's tokens: they have arrived, else there were no logits
        tokens = entry.batch.choose(logits)
        what = f"the tokens of decode step {entry.batch.steps}"
        entry.sent += [self.links.send(tokens, stage, what) for stage in range(self.last)]
        return tokens

    def _receive_tokens(self, entry: _InFlight) -> Tensor:
        what = f"the tokens of decode step {entry.batch.steps}"
        count = len(entry.batch.step.drawing)
        empty = torch.empty(count, dtype=torch.int64, device=self.hidden_like.device)
        tokens = self.links.receive(empty, self.last, what).wait()
        entry.await_sent()  # the hidden states: they have arrived, else there were no tokens
        entry.awaits_tokens = False
        return tokens
