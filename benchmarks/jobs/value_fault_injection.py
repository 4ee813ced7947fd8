"""Changes values in a worker of `value_fault_job.py`, once: the part of the machine in `benchmarks/wrong_values.py`."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from realhf.algorithms.script.rollouts import GenerateInterface, LogprobsInterface
from realhf.algorithms.script.update import UpdateInterface
from realhf.engine.model import ShardedModel
from realhf.engine.train.optimizer import FlatAdamW
from realhf.worker import parameter_moves
from realhf.worker.model_worker import ModelWorker


def install(words: str, worker: int, job: dict[str, Any]) -> None:
    """`words`: JSON with `kind`, `step` (from 0), `worker` (which has the fault; -1: all alike) and `seed`. `job`: the
    names of the job's file."""
    fault = json.loads(words)
    if fault["worker"] in (-1, worker):
        _Injection(fault["step"], random.Random(fault["seed"]), job).of_kind(fault["kind"])


def flip(tensor: Tensor, at_random: random.Random) -> None:
    """Changes one bit of one element, as a memory may: of a number any but those of its exponent and sign."""
    bits = {torch.float32: 23, torch.float64: 52, torch.int64: 5}[tensor.dtype]  # 32 tokens stay tokens
    as_numbers = tensor.view(torch.int64 if tensor.element_size() == 8 else torch.int32).view(-1)
    as_numbers[at_random.randrange(len(as_numbers))] ^= 1 << at_random.randrange(bits)


class _Injection:
    def __init__(self, step: int, at_random: random.Random, job: dict[str, Any]):
        self._step, self._random, self._job, self._is_done = step, at_random, job, False

    def of_kind(self, kind: str) -> None:
        """Wraps the function in which a fault of the kind happens."""
        getattr(self, kind.replace(" ", "_"))()

    def _around(self, owner: Any, name: str, wrap: Callable[..., Any], step_of: Callable[..., int]) -> None:
        """In the step, once, `wrap` is called in place of the function, with it before its arguments."""
        rightly = getattr(owner, name)

        def wrapped(*arguments: Any, **more: Any) -> Any:
            if self._is_done or step_of(*arguments) != self._step:
                return rightly(*arguments, **more)
            self._is_done = True
            return wrap(rightly, *arguments, **more)

        setattr(owner, name, wrapped)

    def _of_context(self, owner: Any, name: str, wrap: Callable[..., Any]) -> None:
        self._around(owner, name, wrap, lambda *arguments: arguments[-1].step)

    def bit_of_the_actor(self) -> None:
        def after(rightly: Any, interface: Any, model: Any, batches: Any, context: Any) -> Any:
            result = rightly(interface, model, batches, context)
            self._flip_after_reply(model)
            return result

        self._of_context(UpdateInterface, "train_step", after)

    def _flip_after_reply(self, model: Any) -> None:
        handle = ModelWorker.handle

        def handled(worker: Any, request: Any) -> Any:
            reply = handle(worker, request)
            ModelWorker.handle = handle  # type: ignore[method-assign]
            flip(self._random.choice(model.residency.held())[1], self._random)
            return reply

        ModelWorker.handle = handled  # type: ignore[method-assign]
        # This request is handled by the function of before: the flip comes behind the next, which frees data.

    def bit_of_the_reference(self) -> None:
        def after(rightly: Any, interface: Any, model: Any, batch: Any, context: Any) -> Any:
            result = rightly(interface, model, batch, context)
            flip(self._random.choice(model.residency.held())[1], self._random)
            return result

        self._of_context(LogprobsInterface, "inference", after)

    def bit_of_gradients(self) -> None:
        self._at_optimizer(lambda rightly, optimizer, gradients, *more: (
            flip(self._random.choice(gradients), self._random), rightly(optimizer, gradients, *more),
        ))  # fmt: skip

    def optimizer_step_left_out(self) -> None:
        def left_out(_: Any, optimizer: Any, *__: Any) -> None:
            optimizer.step_count += 1

        self._at_optimizer(left_out)

    def _at_optimizer(self, wrap: Callable[..., Any]) -> None:
        """Of the two optimizer steps of a training the first one."""
        self._around(FlatAdamW, "step", wrap, lambda optimizer, *_: optimizer.step_count // 2)

    def bit_of_a_message(self) -> None:
        """Of a sample that a call reads, behind the transfer."""
        rightly = ModelWorker._inputs

        def inputs(worker: Any, request: Any, definition: Any, ids: Any) -> Any:
            batch = rightly(worker, request, definition, ids)
            is_due = request.batch.step == self._step and definition.trains and not self._is_done
            if is_due:
                self._is_done = True
                key = self._random.choice(["seq", "ref_logprob"])
                values = [value.clone() for value in batch.data[key]]
                flip(self._random.choice(values), self._random)
                batch = batch.with_data(**{key: values})
            return batch

        ModelWorker._inputs = inputs  # type: ignore[method-assign]

    def skipped_layer(self) -> None:
        owner, name = self._random.choice([(LogprobsInterface, "inference"), (UpdateInterface, "train_step")])

        def without(rightly: Any, interface: Any, model: Any, batch: Any, context: Any) -> Any:
            assert isinstance(model, ShardedModel)
            decoder, skipped = model.decoder, self._random.choice([*model.decoder.model.layers.values()])
            before = decoder.trains_layer, decoder.infers_layer

            def skipping(compute: Any) -> Any:
                def layer_or_not(layer: Any, hidden: Tensor, *more: Any) -> Tensor:
                    return hidden if layer is skipped else (compute or type(layer).__call__)(layer, hidden, *more)

                return layer_or_not

            decoder.trains_layer, decoder.infers_layer = map(skipping, before)
            try:
                return rightly(interface, model, batch, context)
            finally:
                decoder.trains_layer, decoder.infers_layer = before

        self._of_context(owner, name, without)

    def stale_copy(self) -> None:
        """The copy of the actor keeps the values of the step before."""
        rightly, before = parameter_moves.execute, list[list[Tensor]]()

        def execute(part: Any, **more: Any) -> Any:
            result = rightly(part, **more)
            if len(before) == self._step:
                for (_, tensor), value in zip(part.target, before[-1], strict=True):
                    tensor.copy_(value)
            before.append([tensor.clone() for _, tensor in part.target])
            return result

        parameter_moves.execute = execute  # type: ignore[assignment]

    def seed_reused(self) -> None:
        def reused(rightly: Any, interface: Any, model: Any, batch: Any, context: Any) -> Any:
            first, *_, last = range(len(batch))
            ids = tuple(batch.ids[first] if place == last else i for place, i in enumerate(batch.ids))
            return rightly(interface, model, replace(batch, ids=ids), context)

        self._of_context(GenerateInterface, "generate", reused)

    def swapped_mini_batches(self) -> None:
        def swapped(rightly: Any, interface: Any, model: Any, batches: Any, context: Any) -> Any:
            return rightly(interface, model, [*batches][::-1], context)

        self._of_context(UpdateInterface, "train_step", swapped)

    def reward_of_another(self) -> None:
        self._job["SWAPPED_IN"] = self._step
