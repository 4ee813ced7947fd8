"""Ways to train one model with data parallelism: this project's, each operator in its mode, and torch's FSDP2."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from unittest import mock

import torch
from lib.osdp_shapes import Model, Shape
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import realhf
from realhf.architecture.compute import ModeRules
from realhf.engine.train import gathering
from realhf.engine.train.gathering import GatheredUnit
from realhf.parallel.collectives import traffic
from realhf.planning.model.hardware import GIB

SEED = 0


def optimizer_of(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """The same for all ways: one pass over memory."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def model_of(shape: Shape) -> Model:
    torch.manual_seed(SEED)
    return Model(shape)


class Way(Protocol):
    def step(self) -> None:
        """Forward, backward and update of this rank's samples."""


class FullyShard:
    """torch's FSDP2: every block gathered for its forward and its backward pass, the rest with the model."""

    def __init__(self, shape: Shape, mesh: DeviceMesh, tokens: Tensor):
        self.model, self.tokens = model_of(shape), tokens
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = optimizer_of(list(self.model.parameters()))

    def step(self) -> None:
        self.model(self.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Osdp:
    """`realhf.osdp` under a limit of memory, or with given modes under none.

    Its measured sizes are of the tensors that are there, not of its plan.
    """

    def __init__(
        self,
        shape: Shape,
        mesh: DeviceMesh,
        tokens: Tensor,
        *,
        memory_bytes: int | None = None,
        modes: str | ModeRules | None = None,
        prefetch: bool = True,
        recompute: bool = False,
    ):
        model, self.tokens = model_of(shape), tokens
        unlimited = 2**40
        self.wrapped = realhf.osdp(
            model,
            optimizer_of,
            mesh,
            memory_gb=(memory_bytes or unlimited) / GIB,
            batch_size=len(tokens),
            example=lambda samples: model(tokens[:samples]),
            modes=modes,
            prefetch=prefetch,
            recompute=recompute,
        )
        self.plan = self.wrapped.plan

    def step(self) -> None:
        self.wrapped(self.tokens).backward()
        self.wrapped.step()

    @property
    def planned_state_bytes(self) -> int:
        """Parameters, gradients, optimizer states and gathers, as planned."""
        chosen = self.plan.chosen
        return int(chosen.memory_bytes - chosen.batch * chosen.problem.bytes_per_sample)

    def sent_bytes(self) -> int:
        """Of one step of this rank."""
        with traffic() as counted:
            self.step()
        return counted.sent_bytes.total()

    def peaks(self) -> tuple[int, int]:
        """(bytes of parameters, gradients, optimizer states and gathers, those of gathered parameters alone): the most
        that were there at the same time in a step."""
        vectors = self.wrapped._vectors
        units = list(vectors.gathered.values())
        states = [value for state in self.wrapped.optimizer.state.values() for value in state.values()]
        kept = sum(tensor.nbytes for tensor in (vectors.flat, vectors.gradient, *states))
        most = [kept, 0]

        def look(*reduced: Any) -> None:
            """`reduced`: gradients that are about to be summed over the ranks, no longer those of a parameter."""
            gathered = sum(unit.arena.flat.untyped_storage().nbytes() for unit in units)
            gradients = [p.grad for unit in units for p in unit.parameters.values() if p.grad is not None]
            gradients += [each for each in reduced if isinstance(each, Tensor)]
            most[:] = max(most[0], kept + gathered + sum(each.nbytes for each in gradients)), max(most[1], gathered)

        with (
            _seen(GatheredUnit, "start_gather", look),
            _seen(GatheredUnit, "reduce_gradients", look),
            _seen(gathering, "reduce_scatter", look),
        ):
            self.step()
        return most[0], most[1]


@contextmanager
def _seen(owner: Any, name: str, look: Callable[..., None]) -> Iterator[None]:
    """Within it `look` gets the arguments of every call of a function, before it and after it."""
    plain = getattr(owner, name)

    def seen(*args: Any) -> Any:
        look(*args)
        result = plain(*args)
        look(*args)
        return result

    with mock.patch.object(owner, name, seen):
        yield
