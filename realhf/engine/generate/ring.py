"""The messages of generation between pipeline stages: each stage sends to the next one, and the last to the first."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.base.errors import RunError
from realhf.parallel.groups import ParallelGroups


@dataclass(frozen=True)
class _Message:
    """A tensor on its way; `what` names the message and the peer, for errors."""

    tensor: Tensor
    work: dist.Work | None
    what: str


class BatchMessages:
    """The messages of this stage about one batch: hidden states go down the stages, and the tokens behind them.

    Tokens pass from stage to stage, since NCCL makes a communicator for every pair of ranks that send to each other: so
    each rank has two. A stage has them before the next hidden states, which it could not use without.

    Sends do not wait. The two ends of a pair of ranks post their messages in one order.

    Args:
        hidden_like: [0, hidden], of the dtype and device of hidden states.
    """

    def __init__(self, groups: ParallelGroups, hidden_like: Tensor, timeout_s: float):
        self.is_last_stage = groups.is_last_stage
        self._groups, self._hidden_like, self._timeout_s = groups, hidden_like, timeout_s
        self._last = groups.layout.strategy.pp - 1
        self._sent: list[_Message] = []
        self._incoming: _Message | None = None

    def expect_hidden(self, step: int, rows: int) -> None:
        """Posts the receive of a step's hidden states [rows, hidden], except on the first stage."""
        self._step = step
        if not self._groups.is_first_stage:
            hidden = self._hidden_like.new_empty(rows, self._hidden_like.shape[1])
            self._incoming = self._receive(hidden, self._groups.stage - 1, "hidden states")

    def hidden(self) -> Tensor | None:
        """The hidden states of the previous stage; None on the first."""
        return None if self._incoming is None else self._wait(self._incoming)

    def send_hidden(self, hidden: Tensor) -> None:
        self._send(hidden, self._groups.stage + 1, "hidden states")

    def send_tokens(self, tokens: Tensor) -> None:
        """Sends the step's tokens from the last stage to the first."""
        self.await_sent()  # the last step's tokens: they have arrived, else there were no logits
        if self._last > 0:
            self._send(tokens, 0, "tokens")

    def receive_tokens(self, count: int) -> Tensor:
        """The step's tokens [count], which go on to the next stage."""
        empty = torch.empty(count, dtype=torch.int64, device=self._hidden_like.device)
        tokens = self._wait(self._receive(empty, self._groups.stage - 1, "tokens"))
        self.await_sent()  # hidden states, and tokens before them: they have arrived, else there were no tokens
        if self._groups.stage + 1 < self._last:
            self._send(tokens, self._groups.stage + 1, "tokens")
        return tokens

    def await_sent(self) -> None:
        for message in self._sent:
            self._wait(message)
        self._sent.clear()

    def _send(self, tensor: Tensor, stage: int, name: str) -> None:
        peer, tensor = self._groups.stage_rank(stage), tensor.contiguous()
        what = f"rank {self._groups.rank} waited for rank {peer} to take the {name} of decode step {self._step}"
        self._sent.append(_Message(tensor, dist.isend(tensor, peer, self._groups.pipeline), what))

    def _receive(self, tensor: Tensor, stage: int, name: str) -> _Message:
        peer = self._groups.stage_rank(stage)
        what = f"rank {self._groups.rank} waited for the {name} of decode step {self._step} from rank {peer}"
        return _Message(tensor, dist.irecv(tensor, peer, self._groups.pipeline), what)

    def _wait(self, message: _Message) -> Tensor:
        assert message.work is not None, "this rank is in the pipeline"
        try:  # what describes the wait must not hold the tensor
            self._groups.waits.wait(message.work, self._timeout_s, partial("generate: {}".format, message.what))
        except RuntimeError as error:
            raise RunError(f"generate: {message.what} (deadline {self._timeout_s:g} s): {error}") from error
        return message.tensor
