"""One rank's part of a model, laid out for a call: what interfaces are called with."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from realhf.api.experiment import OptimizerConfig
from realhf.api.generation import GenerationOptions
from realhf.architecture.compute import ComputeConfig
from realhf.architecture.model import DecoderConfig
from realhf.engine import build
from realhf.engine.arena import Arena
from realhf.engine.batch import Batch, check_tokens
from realhf.engine.forward import forward
from realhf.engine.generate.decode_graphs import DecodeWorkspace, capture_of
from realhf.engine.generate.loop import generate
from realhf.engine.interface import EndCheck, GenerationOutput, LossFunction, Postprocess, Stats
from realhf.engine.residency.offload import HostCopy, allocate, free
from realhf.engine.residency.versions import ParameterVersions
from realhf.engine.train.data_parallel import Parameters, ReplicatedParameters
from realhf.engine.train.fsdp import ShardedParameters
from realhf.engine.train.pipeline import Neighbours
from realhf.engine.train.step import Trainer
from realhf.geometry.boxes import Box
from realhf.geometry.shards import shard_boxes
from realhf.models.checkpoint import CheckpointReader
from realhf.models.checkpoint_index import newer_kinds, of_kind, optimizer_steps
from realhf.parallel.groups import ParallelGroups
from realhf.realloc.execute.held import by_name, holds, part

LENT = "the parameters are in a copy until the call in its layout has ended, and other calls of the model wait for it"
OFFLOADED = "the parameters wait in host memory; `load` brings them back before they are used"


class ShardedModel:
    """Implements `realhf.engine.interface.Model` on the parameters that this rank holds under a layout.

    The parameters are zeros until `initialise`, or until something writes into `held()` and calls
    `parameters_changed`. Without an `optimizer` there are neither gradients nor optimizer state,
    and `train_step` is an error. It keeps several versions of its parameters where `versions` numbers them.
    """

    def __init__(
        self,
        config: DecoderConfig,
        groups: ParallelGroups,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        optimizer: OptimizerConfig | None = None,
        total_optimizer_steps: int = 0,
        compute: ComputeConfig | None = None,
        timeout_s: float = 600.0,
        versions: Sequence[int] = (0,),
    ):
        self.config, self.groups = config, groups
        self.tokens_processed = 0  # of all batches so far, on ranks that hold outputs
        self.is_lent = False  # to a copy, which has the parameters: these have no memory, and no call may use them
        self._in_copy: list[tuple[Box, Tensor]] = []  # where they are then
        compute = compute or ComputeConfig()
        is_sharded = compute.data_parallel == "fsdp" and groups.data is not None
        self.parameters: Parameters = (ShardedParameters if is_sharded else ReplicatedParameters)(
            config, groups, dtype, torch.device(device)
        )
        self.decoder = self.parameters.decoder
        self._workspace: DecodeWorkspace | None = None
        self._neighbours = Neighbours(groups, config.hidden_size, self.parameters.flat, timeout_s)
        if compute.backend == "megatron" and optimizer is not None:
            self.decoder.trains_layer = build.megatron_layers(config, groups, dtype, torch.device(device))
        self.trainer: Trainer | None = None
        if optimizer is not None:
            self.trainer = Trainer(self.parameters, self._neighbours, optimizer, total_optimizer_steps, compute)
        self.versions = ParameterVersions(self.parameters.flat, versions)
        self._waiting_parameters = HostCopy([self.parameters.flat, *self.versions.others])
        self._waiting_states = HostCopy(self.trainer.optimizer.on_device() if self.trainer else [])

    def initialise(self, seed: int) -> None:
        """Random weights that depend on the seed alone, whatever the layout; see `build.fill_initial`."""
        build.fill_initial(self.config, self.parameters.held(), seed)
        self.parameters_changed()

    def free_parameters(self) -> None:
        """Gives the memory of parameters and KV cache back, and keeps what is built on the parameters, gradients and
        optimizer states included."""
        self.forget_graphs()
        free(self.parameters.flat)

    def forget_graphs(self) -> None:
        """Gives back what generation keeps between its calls."""
        self._workspace = None

    def allocate_parameters(self) -> None:
        """Memory for the parameters after `free_parameters`, to be written through `held()` before any use."""
        allocate(self.parameters.flat)

    def lend_to(self, copy: "ShardedModel") -> None:
        """Frees these parameters until `take_back_from`, if `copy` has all of them; else nothing happens.

        So a model is not kept twice while it computes in another layout (HybridFlow, section 5.3).
        """
        there = by_name(copy.held())
        held = self.held()
        if all(holds(there, box) for box, _ in held):
            self._in_copy = [(box, part(there, box)) for box, _ in held]
            self.free_parameters()
            self.is_lent = True

    def take_back_from(self, copy: "ShardedModel") -> None:
        """The parameters as they were before `lend_to`, bit by bit, from a copy that did not change them."""
        if self.is_lent:
            self.is_lent = False
            self.allocate_parameters()
            self.parameters.flat.zero_()  # the padding: norms and the optimizer count on zeros
            there = by_name(copy.held())
            for box, tensor in self.held():
                tensor.copy_(part(there, box))
            self._in_copy = []

    def offload(self) -> None:
        """Parameters and optimizer states wait in host memory until `load`, and have no memory on the device.

        So do gradients, of which nothing is kept, and the KV cache. Nothing is copied where nothing has changed since
        the last time.
        """
        assert not self.is_lent, LENT
        self._workspace = None
        self._waiting_parameters.offload()
        if self.trainer is not None and not self._waiting_states.is_offloaded:
            self._waiting_states.offload()
            free(self.parameters.gradient)

    def load(self, *, states: bool = True) -> None:
        """Parameters are on the device again, as they were before `offload`; with `states` the optimizer's too, and
        memory for gradients, without which the model cannot train. What is there already stays."""
        self._waiting_parameters.load()
        if states and self.trainer is not None and self._waiting_states.is_offloaded:
            self._waiting_states.load()
            allocate(self.parameters.gradient)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Within it all of the model is on the device, wherever it is before and after."""
        was_offloaded = self._waiting_parameters.is_offloaded
        self.load()
        try:
            yield
        finally:
            if was_offloaded:
                self.offload()

    def held(self) -> list[tuple[Box, Tensor]]:
        """(which part of a global parameter, the local tensor, to be read or written in place), for all that this rank
        keeps; fully sharded, a parameter may have several boxes here or none."""
        self._check_presence()
        return self.parameters.held()

    def readable(self, version: int | None = None) -> list[tuple[Box, Tensor]]:
        """As `held`, but to be read alone; of parameters that are lent these are the views of the copy.

        Of a `version` that does not compute, they are where it is kept. Raises LookupError where it is not.
        """
        assert not self._waiting_parameters.is_offloaded, OFFLOADED
        if version is None or version == self.versions.current:
            return self._in_copy if self.is_lent else self.held()
        kept = self.versions.vector(version)
        return [(box, kept.as_strided(t.shape, t.stride(), t.storage_offset())) for box, t in self.parameters.held()]

    def boxes(self) -> dict[str, tuple[Box, Tensor]]:
        """As `held`, by name; not for a fully sharded model."""
        return {box.name: (box, tensor) for box, tensor in self._replicated.held()}

    @property
    def arena(self) -> Arena:
        """What the parameters lie in; not for a fully sharded model."""
        return self._replicated.arena

    @property
    def _replicated(self) -> ReplicatedParameters:
        assert isinstance(self.parameters, ReplicatedParameters), "a fully sharded model keeps no whole parameters"
        return self.parameters

    def parameters_changed(self) -> None:
        """To be called after the parameters were written from outside."""
        self._values_changed()
        if self.trainer is not None:
            self.trainer.optimizer.parameters_changed()

    def select_version(self, number: int) -> None:
        """From now on parameters are those of version `number`. Raises LookupError where it is not kept."""
        self._check_presence()
        if self.versions.select(number):
            self.parameters_changed()

    def _values_changed(self) -> None:
        self._waiting_parameters.has_changed = self._waiting_states.has_changed = True

    def optimizer_state(self) -> list[tuple[Box, Tensor]]:
        """See `Trainer.state`; [] without an optimizer."""
        return [] if self.trainer is None else self.trainer.state()

    def state(self) -> list[tuple[Box, Tensor]]:
        """What this rank writes of the model: boxes of parameters, of the lowest version where there are several, of
        the others (`NAME@newer_1`), and of its optimizer's states (`NAME@exp_avg`).

        Views of the live tensors, in the order and of the places that
        `realhf.models.checkpoint_index.state_owners` gives this rank: every element of the model is in one rank's.
        """
        groups, start = self.groups, self.parameters.shard.storage_offset()
        counted = shard_boxes(self.config, groups.layout, groups.rank, self.parameters.data_parallel, only_counted=True)
        kinds = 0 if self.trainer is None else len(self.trainer.optimizer.state)
        states = [] if self.trainer is None else self.trainer.state(only_counted=True)
        versions = self.versions.by_age()
        named = list(zip(("", *newer_kinds(len(versions))), versions, strict=True))
        pieces = []
        for i, (box, at) in enumerate(counted):
            here = slice(start + at, start + at + box.size)
            pieces += [(of_kind(box, kind), version[here].view(box.shape)) for kind, version in named]
            pieces += states[i * kinds : (i + 1) * kinds]
        return pieces

    def load_state(self, reader: CheckpointReader) -> None:
        """Takes parameters, optimizer states and step from a checkpoint with all of them, saved in any layout.

        What was saved in the dtypes of this model comes back bit by bit. A model of a wider dtype takes its
        parameters from the master copy, and one of a narrower dtype its master copy from the parameters.

        Raises:
            UserError: another architecture, no optimizer states, or a damaged file.
        """
        assert self.trainer is not None, "a model without an optimizer reads parameters alone into `held`"
        reader.check_architecture(self.config)
        saved = set(reader.names())
        steps = optimizer_steps(reader.index, reader.directory)
        is_wide = not self.trainer.optimizer.has_master
        for box, tensor in self.held():
            master = of_kind(box, "master")
            reader.read_into(tensor, master if is_wide and master.name in saved else box)
        for box, tensor in self.trainer.state():
            name, _, kind = box.name.partition("@")
            is_missing = kind == "master" and box.name not in saved
            reader.read_into(tensor, Box(name, box.offset, box.shape) if is_missing else box)
        self.optimizer_steps = steps
        self._values_changed()

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps made so far; settable, for a loaded checkpoint."""
        return 0 if self.trainer is None else self.trainer.optimizer.step_count

    @optimizer_steps.setter
    def optimizer_steps(self, steps: int) -> None:
        assert self.trainer is not None, "a model without an optimizer makes no optimizer steps"
        self.trainer.optimizer.step_count = steps

    def forward(
        self, batch: Batch, tokens_key: str, postprocess: Postprocess, micro_batches: int
    ) -> dict[str, list[Tensor]]:
        check_tokens(batch, tokens_key, self.config)
        self._count(batch.data[tokens_key])
        with self.parameters.computing():
            return forward(self.decoder, self._neighbours, batch, tokens_key, postprocess, micro_batches)

    def train_step(
        self, batch: Batch, tokens_key: str, loss: LossFunction, weight: Callable[[Batch], float], micro_batches: int
    ) -> Stats:
        assert self.trainer is not None, "train_step on a model that was built without an optimizer"
        check_tokens(batch, tokens_key, self.config)
        self._values_changed()
        self._count(batch.data[tokens_key])
        return self.trainer.train_step(batch, tokens_key, loss, weight, micro_batches)

    def generate(
        self,
        batch: Batch,
        prompt_key: str,
        options: GenerationOptions,
        *,
        sample_key: tuple[int, int],
        micro_batches: int,
        forced: Sequence[Tensor] | None = None,
        return_logits: bool = False,
        is_end: EndCheck | None = None,
    ) -> GenerationOutput:
        self._check_presence()
        with self.parameters.whole():
            output = generate(
                self.decoder,
                batch,
                prompt_key,
                options,
                sample_key=sample_key,
                micro_batches=micro_batches,
                forced=forced,
                return_logits=return_logits,
                is_end=is_end,
                workspace=self._workspace_for(options),
                timeout_s=self._neighbours.timeout_s,
            )
        self._count(output.sequences)
        return output

    def _workspace_for(self, options: GenerationOptions) -> DecodeWorkspace | None:
        """What generation keeps between calls; nothing where the parameters lie elsewhere in the next one."""
        if options.decode_graphs != "kept" or isinstance(self.parameters, ShardedParameters):
            self._workspace = None
        elif self._workspace is None:
            self._workspace = DecodeWorkspace(capture_of(self.decoder, options), self._neighbours.timeout_s)
        return self._workspace

    def _check_presence(self) -> None:
        """To be called before the parameters are used, without which they would be views of nothing."""
        assert not self.is_lent, LENT
        assert not self._waiting_parameters.is_offloaded, OFFLOADED

    def _count(self, sequences: Sequence[Tensor]) -> None:
        self._check_presence()
        self.tokens_processed += sum(map(len, sequences))
