"""The messages of generation between pipeline stages: hidden states go down, tokens come back."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.base.errors import RunError
from realhf.parallel.groups import ParallelGroups
from realhf.parallel.waiting import Waits


@dataclass(frozen=True)
class _Message:
    """A tensor on its way; `what` names the message and the peer, for errors."""

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


class BatchMessages:
    """The messages of this stage about one batch: hidden states go down the stages, tokens come back.

    Sends do not wait. The two ends of a pair of ranks post their messages in one order.

    Args:
        hidden_like: [0, hidden], of the dtype and device of hidden states.
    """

    def __init__(self, groups: ParallelGroups, hidden_like: Tensor, timeout_s: float):
        self.is_last_stage = groups.is_last_stage
        self._groups, self._hidden_like = groups, hidden_like
        self._links = _Links(groups, timeout_s)
        self._last = groups.layout.strategy.pp - 1
        self._sent: list[_Message] = []
        self._incoming: _Message | None = None

    def expect_hidden(self, step: int, rows: int) -> None:
        """Posts the receive of a step's hidden states [rows, hidden], except on the first stage."""
        self._step = step
        if not self._groups.is_first_stage:
            hidden = self._hidden_like.new_empty(rows, self._hidden_like.shape[1])
            self._incoming = self._links.receive(hidden, self._groups.stage - 1, self._name("hidden states"))

    def hidden(self) -> Tensor | None:
        """The hidden states of the previous stage; None on the first."""
        return None if self._incoming is None else self._incoming.wait()

    def send_hidden(self, hidden: Tensor) -> None:
        self._sent.append(self._links.send(hidden, self._groups.stage + 1, self._name("hidden states")))

    def send_tokens(self, tokens: Tensor) -> None:
        """Sends the step's tokens from the last stage to all others."""
        self.await_sent()  # the last step's tokens: they have arrived, else there were no logits
        self._sent = [self._links.send(tokens, stage, self._name("tokens")) for stage in range(self._last)]

    def receive_tokens(self, count: int) -> Tensor:
        """The step's tokens [count] from the last stage."""
        empty = torch.empty(count, dtype=torch.int64, device=self._hidden_like.device)
        tokens = self._links.receive(empty, self._last, self._name("tokens")).wait()
        self.await_sent()  # the hidden states: they have arrived, else there were no tokens
        return tokens

    def await_sent(self) -> None:
        for message in self._sent:
            message.wait()
        self._sent.clear()

    def _name(self, what: str) -> str:
        return f"the {what} of decode step {self._step}"
