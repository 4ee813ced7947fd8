"""The model worker: executes the master's requests on one device, one after the other."""

import importlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from realhf.api.graph import DataflowGraph, ModelFunctionCallDef, ModelInterfaceType
from realhf.api.interface import InterfaceConfig
from realhf.api.layout import Layout
from realhf.api.run import Run
from realhf.data.loader import DatasetReader
from realhf.engine.batch import Batch, concatenate
from realhf.engine.interface import CallResult
from realhf.engine.model import ShardedModel
from realhf.models.checkpoint import snapshot
from realhf.models.checkpoint_index import initial_optimizer_steps
from realhf.parallel.groups import GroupTable, ParallelGroups
from realhf.realloc.executor import execute
from realhf.realloc.planner import plan_between
from realhf.realloc.transport import Transport, transport_between
from realhf.realloc.verification import VerificationSchedule, verify
from realhf.scheduler.run_directory import RunDirectory
from realhf.transport.messages import (
    BatchKey,
    CallFunction,
    CheckpointWritten,
    FollowParameters,
    FreeBatch,
    LoadModel,
    OffloadModel,
    Parameters,
    Reallocate,
    Release,
    Reply,
    SaveCheckpoint,
    Span,
    Split,
    Transfer,
)
from realhf.worker import rollouts
from realhf.worker.checkpoint_writer import CheckpointWriter
from realhf.worker.home import fill
from realhf.worker.mailbox import Mailbox
from realhf.worker.memory import MemoryGauge
from realhf.worker.store import SampleStore, describe

logger = logging.getLogger(__name__)

Request = Parameters | Transfer | CallFunction | FreeBatch | SaveCheckpoint

# Rollouts of an evaluation draw other random numbers than those of training.
EVALUATION_SEED_OFFSET = 0x5EED


class CallContext:
    """The context of one call (see `realhf.engine.interface.Context`)."""

    def __init__(
        self, seed: int, step: int, micro_batches: int, groups: ParallelGroups, record: frozenset[str] = frozenset()
    ):
        self.seed, self.step, self.micro_batches, self.record = seed, step, micro_batches, record
        self.holds_outputs = groups.holds_outputs
        self._data_group = groups.data

    def sum_over_data_parallel(self, values: Tensor) -> Tensor:
        total = values.clone()
        if self._data_group is not None:
            dist.all_reduce(total, group=self._data_group)
        return total


class ModelWorker:
    """Holds the home part of every model that lives on this device, and copies for calls laid out otherwise.

    Between calls a copy has no memory: what is built on its parameters, a hundred modules, is built once. Where a copy
    contains the home's part, the home's parameters have no memory during the call. Nothing else comes between: a
    call's requests, `Reallocate` to `Release`, follow one another on every worker.

    Args:
        set_activity: told in words what the worker does, for heartbeats and post-mortems.
        report_written: told, from another thread, that a checkpoint has been written.
    """

    def __init__(
        self,
        run: Run,
        rank: int,
        device: torch.device,
        directory: RunDirectory,
        set_activity: Callable[[str], None],
        report_written: Callable[[CheckpointWritten], None],
    ):
        self._run, self._rank, self._device, self._directory = run, rank, device, directory
        self._writer = CheckpointWriter(rank, report_written)
        self._set_activity = set_activity
        self._timeout_s = run.spec.call_timeout_s
        self._groups = GroupTable((call.layout for call in run.plan.calls.values()), rank, self._timeout_s)
        self._graphs: dict[Split, DataflowGraph] = {"train": run.graph}
        self._readers: dict[Split, DatasetReader] = {
            "train": DatasetReader(run.experiment.dataset, run.experiment.seed, run.settings.batch_size)
        }
        if run.evaluation and run.evaluation_graph:
            self._graphs["evaluation"] = run.evaluation_graph
            self._readers["evaluation"] = DatasetReader(run.evaluation.dataset, None, run.evaluation.batch_size)
        self._verification = VerificationSchedule(run.spec.verify_reallocations_every)
        self._memory = MemoryGauge(device)
        self._store = SampleStore()
        self._mailbox = Mailbox(self._store, device, self._timeout_s)
        self._interfaces: dict[tuple[Split, str], Any] = {}
        self._models: dict[tuple[str, Layout], ShardedModel] = {}
        for name, home in run.homes.items():
            if rank in home.mesh.devices:
                self._set_activity(f"setup: model {name}")
                self._models[name, home] = self._build_home(name, home)
                logger.info("model %s is here, %s", name, home)
                if name in run.plan.offload:
                    self._models[name, home].offload()  # before the next one is built

    def handle(self, request: Request) -> Reply | None:
        """Executes one request; what it raises ends the run."""
        match request:
            case CallFunction():
                return self._call(request)
            case Transfer(batch=batch, sends=sends, receives=receives):
                self._mailbox.post(batch, sends, receives)
            case Reallocate(request_id=request_id, batch=batch, call=call):
                with self._timed("reallocation", f"{call} of {batch}") as span:
                    self._reallocate(request.model, request.layout, batch.step)
                return Reply(request_id=request_id, span=span())
            case FollowParameters(request_id=request_id, batch=batch, name=name):
                with self._timed("reallocation", f"{name} of {batch}") as span:
                    self._follow(name)
                return Reply(request_id=request_id, span=span())
            case LoadModel(request_id=request_id, batch=batch, model=name, states=states):
                with self._timed("offload", f"load {name} in {batch}") as span:
                    self._models[name, self._run.homes[name]].load(states=states)
                return Reply(request_id=request_id, span=span())
            case OffloadModel(request_id=request_id, batch=batch, model=name):
                with self._timed("offload", f"offload {name} in {batch}") as span:
                    self._models[name, self._run.homes[name]].offload()
                return Reply(request_id=request_id, span=span())
            case Release(model=model, layout=layout):
                self._release(model, layout)
            case FreeBatch(batch=batch):
                self._mailbox.free(batch)
                self._store.free(batch)
            case SaveCheckpoint(request_id=request_id):
                with self._timed("checkpoint", Path(request.directory).name) as span:
                    self._save(request.directory, request.models)
                return Reply(request_id=request_id, span=span())
        return None

    @contextmanager
    def _timed(self, phase, name):
        self._set_activity(f"{name}: {phase}")
        start = time.time()
        yield lambda: Span(phase, name, start, time.time())
        logger.info("%s took %.3f s", phase, time.time() - start)
        self._set_activity(f"waiting, after {name}: {phase}")

    def _build_home(self, name: str, home: Layout) -> ShardedModel:
        run, setup = self._run, self._run.models[name]
        steps = run.experiment.steps * run.optimizer_steps(name)
        model = ShardedModel(
            run.graph.models[name],
            self._groups.groups(home),
            getattr(torch, setup.dtype),
            self._device,
            optimizer=setup.optimizer if steps else None,
            total_optimizer_steps=initial_optimizer_steps(setup) + steps,
            compute=setup.compute,
            timeout_s=self._timeout_s,
        )
        fill(model, run, name, self._directory.checkpoints)
        return model

    def _reallocate(self, name: str, layout: Layout, step: int) -> None:
        home, dtype = self._run.homes[name], getattr(torch, self._run.models[name].dtype)
        source = self._models.get((name, home))
        target = self._models.get((name, layout))
        if target is not None:
            target.allocate_parameters()
        elif self._rank in layout.mesh.devices:
            target = ShardedModel(
                self._run.graph.models[name],
                self._groups.groups(layout),
                dtype,
                self._device,
                timeout_s=self._timeout_s,
            )
            self._models[name, layout] = target
        plan = plan_between(
            self._run.graph.models[name],
            home,
            layout,
            self._run.spec.devices_per_node,
            element_bytes=dtype.itemsize,
            source_data_parallel=self._run.models[name].compute.data_parallel,
        )
        source_boxes, target_boxes = source.held() if source else [], target.held() if target else []
        transport = self._transport(home, layout)
        execute(plan, self._rank, source_boxes, target_boxes, transport, model_name=name, timeout_s=self._timeout_s)
        if self._verification.is_due(name, layout, step):
            verify(plan, self._rank, source_boxes, target_boxes, transport, model_name=name, timeout_s=self._timeout_s)
        if source is not None and target is not None:
            source.lend_to(target)

    def _release(self, name: str, layout: Layout) -> None:
        copy = self._models[name, layout]
        if home := self._models.get((name, self._run.homes[name])):
            home.take_back_from(copy)
        copy.free_parameters()

    def _follow(self, name: str) -> None:
        run, node = self._run, self._run.graph.follows[name]
        source, target = (self._models.get((model, run.homes[model])) for model in (node.source, node.target))
        plan = plan_between(
            run.graph.models[node.target],
            run.homes[node.source],
            run.homes[node.target],
            run.spec.devices_per_node,
            element_bytes=getattr(torch, run.models[node.target].dtype).itemsize,
            source_data_parallel=run.models[node.source].compute.data_parallel,
            target_data_parallel=run.models[node.target].compute.data_parallel,
            forwarding=False,  # a device would send on its average
        )
        execute(
            plan,
            self._rank,
            source.held() if source else [],
            target.held() if target else [],
            self._transport(run.homes[node.source], run.homes[node.target]),
            eta=node.eta,
            model_name=node.target,
            timeout_s=self._timeout_s,
        )
        if target:
            target.parameters_changed()

    def _transport(self, source: Layout, target: Layout) -> Transport:
        return transport_between(self._groups.of_host((*source.mesh.devices, *target.mesh.devices)))

    def _call(self, request: CallFunction) -> Reply:
        split, step = request.batch.split, request.batch.step
        definition = self._graphs[split].calls[request.call]
        groups = self._groups.groups(request.layout)
        wait = self._collect(request, definition)
        mini_batches = [self._inputs(request.batch, definition, ids) for ids in request.mini_batches]
        model = self._models[definition.model_name, request.layout]
        seed = self._run.experiment.seed + (EVALUATION_SEED_OFFSET if split == "evaluation" else 0)
        record = frozenset(self._run.spec.record)
        context = CallContext(seed, step, request.micro_batches, groups, record)
        with self._timed("compute", f"{request.call} of {request.batch}") as span:
            tokens_before = model.tokens_processed
            result = self._compute(split, definition, model, mini_batches, context)
        reply = Reply(request_id=request.request_id, span=span(), wait=wait, peak_bytes=self._memory.take_peak())
        if not groups.holds_outputs:
            return reply
        return msgspec.structs.replace(
            reply,
            outputs=self._keep(request, definition, result.outputs),
            stats=result.stats,
            tokens=model.tokens_processed - tokens_before,
        )

    def _collect(self, request: CallFunction, definition: ModelFunctionCallDef) -> Span | None:
        """Waits for the inputs that are on their way here; returns that wait, if there was one."""
        if not self._mailbox.is_expecting(request.batch, definition.input_data):
            return None
        with self._timed("transfer", f"{request.call} of {request.batch}") as span:
            self._mailbox.collect(request.batch, definition.input_data)
        return span()

    def _compute(
        self,
        split: Split,
        definition: ModelFunctionCallDef,
        model: ShardedModel,
        mini_batches: Sequence[Batch],
        context: CallContext,
    ) -> CallResult:
        interface = self._interface(split, definition)
        match definition.interface_type:
            case ModelInterfaceType.TRAIN_STEP:
                return interface.train_step(model, mini_batches, context)
            case ModelInterfaceType.INFERENCE:
                return interface.inference(model, concatenate(mini_batches), context)
            case ModelInterfaceType.GENERATE:
                return interface.generate(model, concatenate(mini_batches), context)

    def _inputs(self, batch: BatchKey, definition: ModelFunctionCallDef, ids: tuple[int, ...]) -> Batch:
        """The call's input columns: rows of the data set are read here, the rest was made or transferred."""
        graph = self._graphs[batch.split]
        from_rows = [key for key in definition.input_data if key in graph.dataset_keys]
        samples = self._readers[batch.split].read(batch.step, ids, from_rows).to(self._device)
        samples = self._store.add_columns(batch, samples, [k for k in definition.input_data if k in graph.producers])
        if (
            self._run.spec.replay
            and batch.split == "train"
            and definition.interface_type is ModelInterfaceType.GENERATE
        ):
            prompt_key, sequence_key = definition.input_data[0], definition.output_data[0]
            recorded = rollouts.read(Path(self._run.spec.replay), batch.step, definition.name, sequence_key)
            responses = [
                recorded[i][len(prompt) :].to(self._device)
                for i, prompt in zip(ids, samples.data[prompt_key], strict=True)
            ]
            samples = samples.with_data(forced_response=responses)
        return samples

    def _keep(self, request: CallFunction, definition: ModelFunctionCallDef, outputs: dict[str, list[Tensor]]) -> dict:
        """Stores the outputs that the call declares, records those the run asks for; returns their metadata."""
        ids = [sample for mini_batch in request.mini_batches for sample in mini_batch]
        missing = [key for key in definition.output_data if key not in outputs]
        if missing:
            raise KeyError(
                f"{definition.name} declares the outputs {list(definition.output_data)} but its interface "
                f"{type(definition.interface_impl).__name__} returned {sorted(outputs)}; {missing} is missing"
            )
        for key in definition.output_data:
            self._store.put(request.batch, key, ids, outputs[key])
        recorded = {key: outputs[key] for key in self._run.spec.record if key in outputs}
        if recorded and request.batch.split == "train":
            folder = self._directory.path / "rollouts"
            rollouts.record(folder, request.batch.step, definition.name, self._rank, recorded, ids)
        return {key: describe(ids, outputs[key]) for key in definition.output_data}

    def _interface(self, split: Split, definition: ModelFunctionCallDef) -> Any:
        key = (split, definition.name)
        if key not in self._interfaces:
            self._interfaces[key] = load_interface(definition.interface_impl)
        return self._interfaces[key]

    def _save(self, directory: str, models: Sequence[str]) -> None:
        snapshots = {}
        for name in models:
            model = self._models[name, self._run.homes[name]]
            with model.loaded():
                snapshots[name] = snapshot(model.state())
        self._writer.start(directory, snapshots)


def load_interface(config: InterfaceConfig) -> Any:
    """The implementation that the class of `config` names, made with `config`. The name comes from
    the experiment's code, never from a message."""
    module, _, name = type(config).implementation.partition(":")
    return getattr(importlib.import_module(module), name)(config)
