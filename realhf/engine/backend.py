"""The seam between a worker and the engine: the interface of a model for the worker, whichever backend computes it.

To add a backend, write a class that is made from a `ModelSpec` and has the methods of `EngineModel`, and list it in
`realhf.api.backends.BACKENDS`.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from realhf.api.backends import implementation_of
from realhf.api.experiment import OptimizerConfig
from realhf.architecture.compute import Computation
from realhf.architecture.model import DecoderConfig
from realhf.engine.interface import Model
from realhf.engine.residency.residency import Boxes, Residency
from realhf.models.checkpoint import CheckpointReader
from realhf.parallel.groups import ParallelGroups


@dataclass(frozen=True)
class ModelSpec:
    """One rank's part of a model, as a backend is to build it.

    groups: the rank's place in the model's layout, with the process groups of that place.
    optimizer: None for a model that is not trained, which then has neither gradients nor optimizer states.
    total_optimizer_steps: the length of the learning rate's schedule.
    versions: the numbers of the versions of the parameters to be kept; the first one computes.
    timeout_s: the deadline of waiting for another rank.
    """

    config: DecoderConfig
    groups: ParallelGroups
    dtype: torch.dtype
    device: torch.device | str = "cpu"
    optimizer: OptimizerConfig | None = field(default=None, kw_only=True)
    total_optimizer_steps: int = field(default=0, kw_only=True)
    compute: Computation = field(default_factory=Computation, kw_only=True)
    versions: Sequence[int] = field(default=(0,), kw_only=True)
    timeout_s: float = field(default=600.0, kw_only=True)


class EngineModel(Model, Protocol):
    """One rank's part of a model: interfaces call it as a `Model`, the worker fills it, moves it and saves it.

    The parameters are zeros until `initialise`, `load_state`, or until something writes into `residency.held()` and
    calls `residency.written`.

    residency: where the parameters are, and which versions of them there are.
    tokens_processed: of all batches so far, on ranks that hold outputs.
    optimizer_steps: of the learning rate's schedule, how many are over; 0 where the model is not trained. It is set
        where steps were left out.
    """

    residency: Residency
    tokens_processed: int
    optimizer_steps: int

    @property
    def trains(self) -> bool:
        """Whether the model has an optimizer."""

    def initialise(self, seed: int) -> None:
        """Random weights that depend on the seed alone, whatever the layout."""

    def state(self) -> Boxes:
        """The boxes that this rank writes into a checkpoint: parameters (the oldest version where there are several),
        newer versions (`NAME@newer_1`), and optimizer states (`NAME@exp_avg`).

        Views of the live tensors, in the order and of the places that
        `realhf.models.checkpoint_index.state_owners` gives this rank: one rank has every element of the model.
        """

    def masters(self) -> Boxes:
        """The optimizer's float32 copies of the parameters that this rank updates, as boxes of these, to be written in
        place; none where the parameters are float32 themselves, or the model is not trained."""

    def load_state(self, reader: CheckpointReader) -> None:
        """Takes parameters, optimizer states and step from a checkpoint that has them all, saved in any layout.

        Values that were saved in the dtypes of this model come back bit by bit. A model of a wider dtype takes its
        parameters from the master copy, and one of a narrower dtype its master copy from the parameters.

        Raises:
            UserError: the checkpoint is of another architecture, lacks optimizer states, or is damaged.
        """

    def close(self) -> None:
        """Frees the resources that the model keeps between calls, before process groups end."""


def build_model(backend: str, spec: ModelSpec) -> EngineModel:
    """A model with all parameters zero, of the backend that `ModelSetup.backend` names.

    Raises:
        UserError: the backend is not known, or it cannot compute this model here.
    """
    module, _, name = implementation_of(backend).partition(":")
    model: EngineModel = getattr(importlib.import_module(module), name)(spec)
    return model
