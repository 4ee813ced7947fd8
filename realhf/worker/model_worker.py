"""The model worker: executes the master's requests on one device, one after the other; moves of parameters beside."""

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from realhf.data.rows import DatasetRows, rows_of
from realhf.dataflow.graph import WEIGHTS_VERSION, ModelFunctionCallDef, ModelInterfaceType
from realhf.dataflow.splits import Split
from realhf.engine.backend import EngineModel, ModelSpec, build_model
from realhf.engine.batch import Batch, moved
from realhf.engine.exact_sums import use_exact_sums
from realhf.engine.interface import CallResult
from realhf.geometry.layout import Layout
from realhf.geometry.reproducible import gradient_parts
from realhf.models.checkpoint import snapshot
from realhf.parallel.collectives import traffic
from realhf.parallel.groups import GroupTable, group_of_all_ranks
from realhf.parallel.waiting import waits_on
from realhf.rundir.checkpoints import read_state, step_folder
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run
from realhf.transport.clock import now_s
from realhf.transport.messages import (
    CallFunction,
    Completion,
    FreeBatch,
    KeyMetadata,
    LoadModel,
    OffloadModel,
    Parameters,
    Phase,
    PrepareMove,
    Release,
    Reply,
    SaveCheckpoint,
    Span,
    Transfer,
)
from realhf.worker import rollouts
from realhf.worker.beside_thread import BesideCall, BesideThread
from realhf.worker.call_context import CallContext, batch_share, sharing_ranks
from realhf.worker.channels import Channels
from realhf.worker.checkpoint_writer import CheckpointWriter
from realhf.worker.completions import completions
from realhf.worker.home import fill
from realhf.worker.interfaces import complete_schedule, load_interface, run_interface
from realhf.worker.mailbox import Mailbox
from realhf.worker.memory_use import MemoryGauge
from realhf.worker.move_thread import MoveThread
from realhf.worker.parameter_moves import ParameterMoves, groups_of_broadcasts
from realhf.worker.store import SampleStore, describe
from realhf.worker.weights import WeightSums

logger = logging.getLogger(__name__)

Request = Parameters | Transfer | CallFunction | FreeBatch | SaveCheckpoint

# Rollouts of an evaluation draw other random numbers than those of training.
EVALUATION_SEED_OFFSET = 0x5EED

HOST = torch.device("cpu")


class ModelWorker:
    """Holds the home part of every model that lives on this device, and copies for calls laid out otherwise.

    Raises UserError where a checkpoint, an interface or a backend does not fit.
    """

    def __init__(self, run: Run, rank: int, device: torch.device, directory: RunDirectory, channels: Channels):
        self._run, self._rank, self._device, self._directory = run, rank, device, directory
        self._writer = CheckpointWriter(rank, channels.report)
        self._set_activity = channels.activity.set
        self._timeout_s = run.deadlines.longest_s
        layouts = [call.layout for call in run.plan.calls.values()]
        waits = waits_on(device, channels.fail)
        calls = run.calls_with_layouts()
        self._groups = GroupTable(
            layouts,
            rank,
            self._timeout_s,
            sharing_ranks(calls),
            waits,
            sharing_ranks(calls, beside=True),
            groups_of_broadcasts(run),
        )
        self._graphs = run.experiment.graphs
        # Of a live program that has made no call, nobody knows yet how many samples a row has.
        self._readers = {split: rows_of(run, split) for split, graph in self._graphs.items() if graph.calls}
        self._memory = MemoryGauge(device)
        self._store = SampleStore()
        self._reading = threading.Lock()  # guards the data sets: calls, and calls beside the devices, read them
        of_host = group_of_all_ranks(HOST, self._timeout_s) if device.type == "cuda" else None
        self._mailbox = Mailbox(self._store, self._timeout_s, of_host)
        use_exact_sums(run.experiment.reproducible == "layout")
        self._interfaces = self._load_interfaces()
        self._models: dict[tuple[str, Layout], EngineModel] = {}
        self._moves = ParameterMoves(run, rank, device, self._groups, self._models)
        self._weights = WeightSums(run)
        for name, home in run.homes.items():
            if rank in home.mesh.devices:
                self._set_activity(f"setup: model {name}")
                self._models[name, home] = self._build_home(name, home)
                logger.info("model %s is here, %s", name, home)
                if name in run.plan.offload:
                    self._models[name, home].residency.offload()  # before the next one is built
        # Others may have a step's calls before theirs.
        longest_s = (len(run.experiment.graph.calls) + 1) * self._timeout_s
        self._move_thread = MoveThread(channels, self._moves.carry_out, device, longest_s)
        self._beside = BesideThread(channels)

    def handle(self, request: Request) -> Reply | None:
        """Executes one request and returns the reply; any exception ends the run. None: there is no reply, or another
        thread sends it later."""
        self._move_thread.wait()
        reply = self._handle(request)
        self._move_thread.computed()
        return reply

    def close(self) -> None:
        """Ends the threads for moves, for calls beside the devices, for data that is sent on and for deadlines."""
        self._beside.close()
        self._move_thread.close()
        self._mailbox.close()
        for model in self._models.values():
            model.close()  # NCCL takes no groups apart that are in graphs
        self._groups.waits.close()

    def _handle(self, request: Request) -> Reply | None:
        match request:
            case CallFunction(batch=batch, call=call) if self._graphs[batch.split].calls[call].runs_beside:
                self._hand_on(request)
            case CallFunction():
                return self._call(request)
            case Transfer(batch=batch, sends=sends, receives=receives):
                self._mailbox.post(batch, sends, receives)
            case PrepareMove(request_id=request_id, batch=batch, name=name):
                what = f"{name} of {batch}"
                with self._timed("reallocation", what) as span:
                    self._moves.prepare(request)
                self._move_thread.prepared(request)
                self._set_activity(f"{what}: reallocation")  # until the move has ended
                return Reply(request_id=request_id, span=span())
            case LoadModel(request_id=request_id, batch=batch, model=name, states=states):
                with self._timed("offload", f"load {name} in {batch}") as span:
                    self._models[name, self._run.homes[name]].residency.load(states=states)
                return Reply(request_id=request_id, span=span())
            case OffloadModel(request_id=request_id, batch=batch, model=name):
                with self._timed("offload", f"offload {name} in {batch}") as span:
                    self._models[name, self._run.homes[name]].residency.offload()
                return Reply(request_id=request_id, span=span())
            case Release():
                self._moves.release(request)
            case FreeBatch(batch=batch):
                self._mailbox.free(batch)
                self._store.free(batch)
            case SaveCheckpoint(request_id=request_id):
                with self._timed("checkpoint", Path(request.directory).name) as span:
                    self._save(request)
                return Reply(request_id=request_id, span=span())
        return None

    @contextmanager
    def _timed(self, phase: Phase, name: str) -> Iterator[Callable[[], Span]]:
        """Records the activity and logs its duration; yields the function that makes its span afterwards."""
        self._set_activity(f"{name}: {phase}")
        start = now_s()
        yield lambda: Span(phase, name, start, now_s())
        logger.info("%s took %.3f s", phase, now_s() - start)
        self._set_activity(f"waiting, after {name}: {phase}")

    def _load_interfaces(self) -> dict[tuple[Split, str], Any]:
        """One for every call that this worker takes part in: here, so that a mistake in it ends the start."""
        run, loaded = self._run, {}
        for split, graph in self._graphs.items():
            for call in graph.calls.values():
                if self._rank in run.call_plan(split, call).layout.mesh.devices:
                    self._set_activity(f"setup: interface of {call.name}")
                    loaded[split, call.name] = load_interface(call)
        return loaded

    def _interface(self, split: Split, call: ModelFunctionCallDef) -> Any:
        if (split, call.name) not in self._interfaces:  # a live program has made the call since the start
            self._interfaces[split, call.name] = load_interface(call)
        return self._interfaces[split, call.name]

    def _rows(self, split: Split) -> DatasetRows:
        if split not in self._readers:
            self._readers[split] = rows_of(self._run, split)
        return self._readers[split]

    def _build_home(self, name: str, home: Layout) -> EngineModel:
        run, setup, computation = self._run, self._run.experiment.setups[name], self._run.computations[name]
        steps = run.experiment.steps * run.optimizer_steps(name)
        oldest = _first_version(run, name, self._directory.checkpoints)
        spec = ModelSpec(
            run.experiment.graph.models[name],
            self._groups.groups(home),
            getattr(torch, setup.dtype),
            self._device,
            optimizer=setup.optimizer.run_with(computation) if steps and setup.optimizer else None,
            total_optimizer_steps=run.initial_steps[name] + steps,
            compute=computation,
            timeout_s=self._timeout_s,
            versions=range(oldest, oldest + run.experiment.graph.versions_kept(name)),
        )
        model = build_model(setup.backend, spec)
        fill(model, run, name, self._directory.checkpoints)
        return model

    def _call(self, request: CallFunction) -> Reply:
        split, step = request.batch.split, request.batch.step
        definition = self._graphs[split].calls[request.call]
        context = self._context(request, definition)
        wait = self._collect(request, definition)
        mini_batches = [self._inputs(request, definition, ids).to(self._device) for ids in request.mini_batches]
        model = self._models[definition.model_name, request.layout]
        self._moves.select(model, definition.model_name, request.version)
        digests: list[Span] = []
        used = self._summed(request, definition, model, digests)
        used_states: tuple[int, ...] = ()
        if split == "train" and definition.trains and self._weights.are_states_due(definition.model_name, step):
            used_states = self._summed_states(request, model, digests)
        with self._timed("compute", f"{request.call} of {request.batch}") as span, traffic() as sent:
            tokens_before, steps_before = model.tokens_processed, model.optimizer_steps
            result = run_interface(self._interface(split, definition), definition, model, mini_batches, context)
            if definition.trains:
                complete_schedule(definition, model, steps_before + definition.optimizer_steps)
            outputs = {}
            if context.holds_outputs:  # within the time of the call, since a GPU may be at work until they are there
                kept = {*definition.output_data, *self._run.spec.record}
                outputs = {key: moved(column, HOST) for key, column in result.outputs.items() if key in kept}
        made: tuple[int, ...] = ()
        made_states: tuple[int, ...] = ()
        if request.makes_version is not None:
            model.residency.begin_at_version(request.makes_version)
            made = self._summed(request, definition, model, digests)
            made_states = self._summed_states(request, model, digests)
        reply = Reply(
            request_id=request.request_id,
            span=span(),
            wait=wait,
            weights_version=max(0, request.version),
            used_weights=used,
            made_weights=made,
            used_states=used_states,
            made_states=made_states,
            digests=tuple(digests),
            peak_bytes=self._memory.take_peak(),
            sent_bytes=dict(sent.sent_bytes),
            moved=dict(self._moves.moved.pop((definition.model_name, request.layout), {})),
        )
        if not context.holds_outputs:
            return reply
        start = now_s()
        described = self._keep(request, definition, outputs)
        if described:
            digests.append(Span("digest", f"outputs of {request.call} of {request.batch}", start, now_s()))
        return msgspec.structs.replace(
            reply,
            digests=tuple(digests),
            outputs=described,
            stats=result.stats,
            state=context.state,
            completions=self._completions(request, definition, mini_batches, result),
            tokens=(model.tokens_processed - tokens_before) // definition.passes,
        )

    def _summed(
        self, request: CallFunction, definition: ModelFunctionCallDef, model: EngineModel, spans: list[Span]
    ) -> tuple[int, ...]:
        """The bit sums of the parameters that the call's model has now; none where the call does not use it."""
        name, batch = definition.model_name, request.batch
        if not definition.uses_model:
            return ()
        step = batch.step if batch.split == "train" else request.trained_steps
        if not self._weights.are_known(name, request.layout, model, step):
            with self._timed("digest", f"{request.call} of {batch}") as span:
                self._weights.of(name, request.layout, model, step)
            spans.append(span())
        return self._weights.of(name, request.layout, model, step)

    def _summed_states(self, request: CallFunction, model: EngineModel, spans: list[Span]) -> tuple[int, ...]:
        """Those of the optimizer states that the model of a training has now."""
        name = self._graphs[request.batch.split].calls[request.call].model_name
        with self._timed("digest", f"optimizer states of {request.call} of {request.batch}") as span:
            sums = self._weights.of_states(name, model, request.batch.step)
        spans.append(span())
        return sums

    def _hand_on(self, request: CallFunction) -> None:
        """Starts a call on the other thread, beside the devices, on data in host memory."""
        split, what = request.batch.split, f"{request.call} of {request.batch}"
        definition = self._graphs[split].calls[request.call]
        context, wait = self._context(request, definition), self._collect(request, definition)
        interface = self._interface(split, definition)
        inputs = [self._inputs(request, definition, ids) for ids in request.mini_batches]

        def run() -> Reply:
            start = now_s()
            result = run_interface(interface, definition, None, inputs, context)
            described = self._keep(request, definition, result.outputs)
            span = Span("beside", what, start, now_s())
            return Reply(
                request_id=request.request_id,
                span=span,
                wait=wait,
                outputs=described,
                stats=result.stats,
                state=context.state,
                completions=self._completions(request, definition, inputs, result),
            )

        self._beside.start(BesideCall(request.request_id, what, run))

    def _context(self, request: CallFunction, definition: ModelFunctionCallDef) -> CallContext:
        split = request.batch.split
        batch_size, own_parts = self._rows(split).samples(request.batch.step), 0
        if definition.reproducible and definition.trains:
            own_parts = gradient_parts(definition.mini_batch_size(batch_size)) // request.layout.strategy.dp
        return CallContext(
            seed=self._run.experiment.seed + (0 if split == "train" else EVALUATION_SEED_OFFSET),
            step=request.batch.step,
            share=batch_share(definition, request.layout, self._groups),
            batch_size=batch_size,
            steps_made=request.batch.step if split == "train" else request.trained_steps,
            steps=self._run.experiment.steps,
            samples_per_prompt=self._graphs[split].samples_per_prompt,
            micro_batches=request.micro_batches,
            gradient_parts=own_parts,
            decode_graphs=request.decode_graphs,
            kv_cache_tokens=request.kv_cache_tokens,
            record=frozenset(self._run.spec.record),
            state=dict(request.state),
            records=partial(self._records, split),
        )

    def _records(self, split: Split, step: int, ids: Sequence[int]) -> list[dict[str, Any]]:
        with self._reading:
            return self._rows(split).records(step, ids)

    def _completions(
        self,
        request: CallFunction,
        definition: ModelFunctionCallDef,
        data: Sequence[Batch],
        result: CallResult,
    ) -> tuple[Completion, ...]:
        batch, number = request.batch, self._run.spec.samples if self._run.experiment.steps else None
        with self._reading:
            return completions(definition, batch, data, result, self._rows(batch.split), number)

    def _collect(self, request: CallFunction, definition: ModelFunctionCallDef) -> Span | None:
        """Waits for the inputs that are on their way here; returns that wait, if there was one."""
        if not self._mailbox.is_expecting(request.batch, definition.input_data):
            return None
        with self._timed("transfer", f"{request.call} of {request.batch}") as span:
            self._mailbox.collect(request.batch, definition.input_data)
        return span()

    def _inputs(self, request: CallFunction, definition: ModelFunctionCallDef, ids: tuple[int, ...]) -> Batch:
        """The call's input columns, in host memory: rows of the data set are read here, the rest was made or
        transferred."""
        batch, graph = request.batch, self._graphs[request.batch.split]
        from_rows = [key for key in definition.input_data if key in graph.dataset_keys]
        with self._reading:
            rows = self._rows(batch.split).tokens(batch.step, ids)
        columns = {key: [torch.tensor(row[key], dtype=torch.int64) for row in rows] for key in from_rows}
        made = [key for key in definition.input_data if key in graph.producers]
        samples = self._store.add_columns(batch, Batch(ids, columns), made)
        if (
            self._run.spec.replay
            and batch.split == "train"
            and definition.interface_type is ModelInterfaceType.GENERATE
        ):
            prompt_key, sequence_key = definition.input_data[0], definition.output_data[0]
            recorded = rollouts.read(Path(self._run.spec.replay), batch.step, definition.name, sequence_key)
            responses = [recorded[i][len(prompt) :] for i, prompt in zip(ids, samples.data[prompt_key], strict=True)]
            samples = samples.with_data(forced_response=responses)
        # The samples of a prompt stay in one micro-batch where micro-batches of equal size allow it.
        together = math.gcd(len(ids), max(1, len(ids) // request.micro_batches), graph.samples_per_prompt)
        return replace(samples, together=together)

    def _keep(
        self, request: CallFunction, definition: ModelFunctionCallDef, outputs: dict[str, list[Tensor]]
    ) -> dict[str, KeyMetadata]:
        """Stores the outputs that the call declares, records those the run asks for; returns their metadata, with
        digests. All are in host memory.

        Each sample has the version of the weights with which the call ran, where that is declared or asked for.
        """
        ids = [sample for mini_batch in request.mini_batches for sample in mini_batch]
        versions = torch.full((len(ids), 1), max(0, request.version))
        outputs = {WEIGHTS_VERSION: [version.clone() for version in versions]} | outputs
        for key in definition.output_data:
            self._store.put(request.batch, key, ids, outputs[key])
        recorded = {key: outputs[key] for key in self._run.spec.record if key in outputs}
        if recorded and request.batch.split == "train":
            rollouts.record(self._directory.rollouts, request.batch.step, definition.name, self._rank, recorded, ids)
        return {key: describe(ids, outputs[key]) for key in definition.output_data}

    def _save(self, request: SaveCheckpoint) -> None:
        snapshots = {}
        for name in request.models:
            model = self._models[name, self._run.homes[name]]
            with model.residency.loaded():
                # Models that wait in host memory leave their tensors again.
                is_copied = not request.is_last or name in self._run.plan.offload
                snapshots[name] = snapshot(model.state(), copied=is_copied)
        self._writer.start(request.directory, snapshots)


def _first_version(run: Run, model: str, checkpoints: Path) -> int:
    """The version of a model's parameters with which this start begins: of a live program the updates that its
    checkpoint counts, since a round may have any number of them."""
    step = run.spec.resume_step
    if not (run.spec.declared and step and model in run.changing_models):
        return run.experiment.graph.weights_version(model, step)
    return read_state(step_folder(checkpoints, step)).weights[model].version
