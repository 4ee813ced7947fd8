"""What the calls of `weights_job.py` do, and the faults."""

from collections.abc import Sequence
from typing import Any

import torch
from weights_job import AT_STEP, FaultyLogprobs, FaultySFT

from realhf.algorithms.script.rollouts import LogprobsInterface
from realhf.algorithms.script.update import UpdateInterface
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult, Context, Model
from realhf.realloc.execute import changes
from realhf.realloc.execute.executor import Reallocation
from realhf.worker import parameter_moves

PARAMETER = "model.layers.1.mlp.down_proj.weight"


class FaultySFTInterface(UpdateInterface):
    def __init__(self, config: FaultySFT):
        super().__init__(config)
        self._fault = config.fault
        if config.fault in ("bit in a copy", "move left out"):
            self._break_moves()
        if config.fault == "wrong change":
            self._break_changes()

    def train_step(self, model: Model, mini_batches: Sequence[Batch], context: Context) -> CallResult:
        result = super().train_step(model, mini_batches, context)
        is_due = context.step == AT_STEP and torch.distributed.get_rank() == 1
        if is_due and self._fault == "bit of one rank":
            flip(model)
        return result

    def _break_moves(self) -> None:
        """The move of the step is not as it should be: worker 1 gets nothing, or a bit of it is changed behind it."""
        rightly, moves = parameter_moves.execute, 0

        def execute(part: Reallocation, **more: Any) -> Any:
            nonlocal moves
            moves += 1
            result = rightly(part, **more)
            for box, tensor in part.target if moves == AT_STEP + 1 and torch.distributed.get_rank() == 1 else ():
                if self._fault == "move left out":
                    tensor.zero_()
                elif box.name == PARAMETER:
                    tensor.view(torch.int32)[0, 0] ^= 1
            return result

        parameter_moves.execute = execute  # type: ignore[assignment]

    def _break_changes(self) -> None:
        """The last value that is sent of what changed in each part is another one."""
        rightly = changes.encode

        def encode(values: torch.Tensor, known: torch.Tensor) -> torch.Tensor | None:
            text = rightly(values, known)
            if text is not None and text.numel():
                text.view(torch.uint8)[-1] ^= 1
            return text

        changes.encode = encode


class FaultyLogprobsInterface(LogprobsInterface):
    def __init__(self, config: FaultyLogprobs):
        super().__init__(config)
        self._fault = config.fault

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        result = super().inference(model, batch, context)
        if context.step == AT_STEP and self._fault == "bit of the reference":
            flip(model)
        return result


def flip(model: Any) -> None:
    """Changes the lowest bit of an element, as a memory may."""
    for box, tensor in model.residency.held():
        if box.name == PARAMETER:
            tensor.view(torch.int32)[0, 0] ^= 1
