"""The dataflow graph: model function calls and the edges between them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Literal

from realhf.architecture.model import DecoderConfig
from realhf.architecture.named import architecture, model_type
from realhf.base.errors import UserError
from realhf.dataflow.follow import Follow, FollowNode, follow_nodes
from realhf.dataflow.interface import InterfaceConfig
from realhf.dataflow.pools import Pool, check_pools
from realhf.dataflow.protocols import ALL_TO_ALL, THREE_D_PROTO, TransferProtocol
from realhf.geometry.layout import Layout, divisors


class ModelInterfaceType(Enum):
    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN_STEP = "train_step"


GENERATE = ModelInterfaceType.GENERATE
INFERENCE = ModelInterfaceType.INFERENCE
TRAIN_STEP = ModelInterfaceType.TRAIN_STEP


@dataclass(frozen=True, kw_only=True)
class ModelFunctionCallDef:
    """One node of the dataflow graph (ReaL, section 3).

    model_name: calls with one name share one set of parameters. A call that runs beside the devices
        (`InterfaceConfig.runs_beside`) has no model: neither `model_name` nor `model_type`, but a `name`.
    model_type: an architecture, the name of one (`llama7b-critic`), or the directory of a Hugging Face checkpoint with
        a config.json (`-critic` after it asks for a scalar head).
    input_data, output_data: keys of per-sample data; one call or the data set produces a key.
    mini_batches: how many optimizer steps a train_step call makes on the batch.
    protocol: which device gets which part of the batch, and whose outputs are taken (HybridFlow, section 4.1).
        Protocols other than 3D_PROTO are for interfaces that do not use the model (`InterfaceConfig.uses_model`).
    reproducible: its results have the same bits under every layout; the experiment's `reproducible` says so.
    """

    model_name: str = ""
    model_type: DecoderConfig | str | None = None
    interface_type: ModelInterfaceType
    interface_impl: InterfaceConfig
    input_data: Sequence[str] = ()
    output_data: Sequence[str] = ()
    mini_batches: int = 1
    protocol: TransferProtocol = THREE_D_PROTO
    name: str = ""
    reproducible: bool = False

    def __post_init__(self) -> None:
        self._check_model()
        if not self.name:
            object.__setattr__(self, "name", f"{self.model_name}_{self.interface_type.value}")
        for field in ("input_data", "output_data"):
            if isinstance(getattr(self, field), str):
                raise UserError(f"{self.name}: {field}={getattr(self, field)!r} must be a list of keys")
            object.__setattr__(self, field, tuple(getattr(self, field)))
        if isinstance(self.model_type, str):
            is_path = "/" in self.model_type or Path(self.model_type).is_dir()
            found = architecture(self.model_type) if is_path else model_type(self.model_type)
            object.__setattr__(self, "model_type", found)
        if self.mini_batches < 1 or (self.mini_batches > 1 and self.interface_type is not TRAIN_STEP):
            raise UserError(f"{self.name}: mini_batches={self.mini_batches} must be 1, or at least 1 for a train_step")
        for field in ("epochs", "samples_per_prompt"):
            number = getattr(self.interface_impl, field)
            if not isinstance(number, int) or number < 1:
                raise UserError(
                    f"{self.name}: {field}={number!r} of {type(self.interface_impl).__name__} must be a whole number "
                    "of at least 1"
                )
        if self.trains and not self.uses_model:
            raise UserError(
                f"{self.name}: {type(self.interface_impl).__name__} has uses_model=False, but a train_step changes its "
                "model; leave uses_model out, or make it an inference call"
            )

    def _check_model(self) -> None:
        """Raises UserError if a call that runs beside the devices has a model, or another call has none. The former
        gets the protocol by which every device has a part of the batch."""
        config, name = type(self.interface_impl).__name__, self.name or self.model_name or "a call"
        has_model = bool(self.model_name) or self.model_type is not None
        if not self.runs_beside:
            if not self.model_name or self.model_type is None:
                raise UserError(
                    f"{name}: it lacks a model; give model_name and model_type, or an interface that needs none: a "
                    f"configuration with runs_beside=True and uses_model=False, unlike {config}"
                )
            return
        if has_model or self.uses_model:
            raise UserError(
                f"{name}: {config} runs beside the devices (runs_beside=True), where no model is; give the "
                "configuration uses_model=False, and leave model_name and model_type out"
            )
        if not self.name:
            raise UserError(f"a call of {config} has no name, and no model whose name it could have; give it a name=")
        if self.interface_type is not INFERENCE:
            raise UserError(
                f"{name}: {config} runs beside the devices, and interface_type={self.interface_type.value} is for "
                "models; make it an inference call"
            )
        if self.protocol not in (THREE_D_PROTO, ALL_TO_ALL):
            raise UserError(
                f"{name}: protocol {self.protocol.name} is for calls with a layout, and {config} runs beside the "
                "devices, a part of the batch on each; leave protocol out"
            )
        object.__setattr__(self, "protocol", ALL_TO_ALL)

    @property
    def config(self) -> DecoderConfig:
        """The architecture, after a named model type was looked up."""
        assert isinstance(self.model_type, DecoderConfig)
        return self.model_type

    def wide_bytes(self, keys: Iterable[str]) -> int:
        """Bytes of a response token in those of the keys that the call makes and that have many numbers for each."""
        if self.model_type is None:
            return 0
        return sum(
            self.interface_impl.wide_bytes(key, self.config.vocab_size) for key in keys if key in self.output_data
        )

    @property
    def trains(self) -> bool:
        return self.interface_type is TRAIN_STEP

    @property
    def generates(self) -> bool:
        return self.interface_type is GENERATE

    @property
    def uses_model(self) -> bool:
        return self.interface_impl.uses_model

    @property
    def passes(self) -> int:
        """How often the call goes through its batch: the epochs of a train_step."""
        return self.interface_impl.epochs if self.trains else 1

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps in each step of the run; 0 unless the call trains."""
        return self.mini_batches * self.passes if self.trains else 0

    @property
    def runs_beside(self) -> bool:
        """Whether it runs on the host's processors beside the calls of the devices, without a model."""
        return self.interface_impl.runs_beside

    def parts(self, layout: Layout) -> int:
        """How many parts the call's batch is cut into in a layout."""
        return layout.strategy.dp if self.protocol is THREE_D_PROTO else self.protocol.distribute(layout).parts

    def mini_batch_size(self, batch_size: int) -> int:
        """Samples of one mini-batch. Raises UserError where `mini_batches` does not divide the batch."""
        size, rest = divmod(batch_size, self.mini_batches)
        if rest:
            raise UserError(
                f"{self.name}: mini_batches={self.mini_batches} does not divide batch_size={batch_size}; "
                f"choose mini_batches from {', '.join(map(str, divisors(batch_size)))}"
            )
        return size

    def check_protocol(self, layout: Layout) -> None:
        """Raises UserError if the call cannot run under its protocol in `layout`."""
        protocol, usual = self.protocol, THREE_D_PROTO
        if protocol is usual:
            return
        try:
            protocol.check(layout)
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None
        same_parts = protocol.distribute(layout) == usual.distribute(layout)
        if self.uses_model and not (same_parts and set(protocol.collect(layout)) == set(usual.collect(layout))):
            raise UserError(
                f"{self.name}: protocol {protocol.name} differs from {usual.name} on {layout}, and a pass through the "
                f"model needs {usual.name}, so that its devices work on the same samples; leave protocol out, or give "
                f"{type(self.interface_impl).__name__} uses_model=False if it does not use the model"
            )
        if self.output_data and not protocol.restores(layout):
            raise UserError(
                f"{self.name}: protocol {protocol.name} does not collect each sample once, in order, on {layout}, so "
                f"there is no one value of its outputs {', '.join(self.output_data)}; leave output_data empty, or "
                f"choose a protocol that does, such as {usual.name}"
            )


# A key that every call can list in `output_data`: how many training steps the weights that made a sample have seen, a
# tensor of one whole number.
WEIGHTS_VERSION = "weights_version"

EdgeKind = Literal["data", "version", "copy"]  # the last: `realhf.dataflow.copies`


@dataclass(frozen=True)
class Edge:
    """`child` of step t starts after `parent` of step t - steps_back has ended."""

    parent: str
    child: str
    steps_back: int
    kind: EdgeKind
    keys: tuple[str, ...] = ()


def other_name(name: str, number: int) -> str:
    """In a live program, that of the `number`-th call which differs from the first one of its name in settings."""
    return f"{name}~{number}"


def first_name(name: str) -> str:
    """The name that a call had before its settings changed."""
    return name.partition("~")[0]


class DataflowGraph:
    """The validated calls of one step and all edges among the steps.

    Args:
        calls: the `rpcs` of an experiment, in any order. By name they are in `calls`, `model_calls` (those with a
            model, which have a layout) and `beside` (those that run beside the devices).
        dataset_keys: the keys that every row of the data set has.
        follows: by name, the models whose parameters follow those of another one.
        pools: by name, the devices that models are confined to; models without a pool may use all.

    Raises:
        UserError: a key without a producer or with two, a cycle, two calls of one name, a
            model name with two architectures, generate calls with different numbers of samples a prompt, a model
            that cannot follow the one it should, or a pool of a model that there is not.

    Attributes:
        samples_per_prompt: how many neighbouring samples are responses to one prompt, in all generate calls.
    """

    def __init__(
        self,
        calls: Sequence[ModelFunctionCallDef],
        dataset_keys: Sequence[str],
        follows: Mapping[str, Follow] | None = None,
        pools: Mapping[str, Pool] | None = None,
    ):
        self.dataset_keys = tuple(dataset_keys)
        _check_names(calls)
        self.producers = _find_producers(calls, self.dataset_keys)
        self.samples_per_prompt = _samples_per_prompt(calls)
        data_edges, named = self._data_edges(calls), {call.name: call for call in calls}
        self.calls = {name: named[name] for name in _sorted_nodes(list(named), data_edges)}
        self.model_calls = {name: call for name, call in self.calls.items() if not call.runs_beside}
        self.beside = {name: call for name, call in self.calls.items() if call.runs_beside}
        if not self.model_calls:
            raise UserError(
                f"all calls ({', '.join(self.beside)}) run beside the devices, and none has a model; add the call that "
                "makes their inputs"
            )
        self.pools = dict(pools or {})
        check_pools(self.pools, self.models)
        trained = {call.model_name for call in calls if call.trains}
        self.follows: dict[str, FollowNode] = follow_nodes(follows or {}, self.models, trained)
        self.edges = data_edges + self._version_edges() + self._follow_edges()
        self.order = _sorted_nodes(self.nodes, self.edges)

    @property
    def models(self) -> dict[str, DecoderConfig]:
        """Architecture of every model name, in order of first use."""
        return {call.model_name: call.config for call in self.model_calls.values()}

    @property
    def nodes(self) -> list[str]:
        """Names of all nodes of a step: the calls with a model in a topological order, those that run beside the
        devices, then the models that follow others."""
        return [*self.model_calls, *self.beside, *self.follows]

    def place_of(self, name: str) -> str:
        """The call with a model on whose devices a call runs: the call itself, if it has one. A call beside the devices
        runs where the producer of the first of its inputs that a call makes runs; one that reads the data set alone
        runs where the graph's first call does."""
        call = self.calls[name]
        if not call.runs_beside:
            return name
        producer = next((self.producers[key] for key in call.input_data if key in self.producers), None)
        return next(iter(self.model_calls)) if producer is None else self.place_of(producer)

    def rows_per_step(self, batch_size: int, name: str = "batch_size") -> int:
        """Rows of the data set that `batch_size` samples have. Raises UserError where they are no whole number; `name`
        is the user's name of the batch size."""
        rows, rest = divmod(batch_size, self.samples_per_prompt)
        if rest:
            raise UserError(
                f"samples_per_prompt={self.samples_per_prompt} does not divide {name}={batch_size}, which counts "
                f"responses; choose {max(1, rows) * self.samples_per_prompt} responses, or samples_per_prompt from "
                f"{', '.join(map(str, divisors(batch_size)))}"
            )
        return rows

    def weights_version(self, model: str, step: int) -> int:
        """The version of its parameters that `model` uses in `step`: how many training steps they have seen.

        Steps count from 0. A model that follows another with staleness may have versions below 0: its initial weights.
        """
        if follow := self._follow_of(model):
            return follow.version(step)
        return step if any(call.trains for call in self.calls_of(model)) else 0

    def versions_kept(self, model: str) -> int:
        """How many versions of its parameters the home of a model keeps."""
        follow = self._follow_of(model)
        return follow.versions if follow else 1

    def _follow_of(self, model: str) -> FollowNode | None:
        return next((follow for follow in self.follows.values() if follow.target == model), None)

    def calls_of(self, model_name: str) -> list[ModelFunctionCallDef]:
        return [call for call in self.model_calls.values() if call.model_name == model_name]

    def makes(self, key: str) -> bool:
        """Whether a call makes a key."""
        return key in self.producers

    def parents(self, name: str) -> list[Edge]:
        return [edge for edge in self.edges if edge.child == name]

    def consumers(self, key: str) -> list[str]:
        return [call.name for call in self.calls.values() if key in call.input_data]

    def _data_edges(self, calls: Sequence[ModelFunctionCallDef]) -> list[Edge]:
        edges = []
        for call in calls:
            by_producer: dict[str, list[str]] = {}
            for key in call.input_data:
                if key in self.producers:
                    by_producer.setdefault(self.producers[key], []).append(key)
            edges += [Edge(parent, call.name, 0, "data", tuple(keys)) for parent, keys in by_producer.items()]
        return edges

    def _version_edges(self) -> list[Edge]:
        """Edges between calls of one model: its readers in step t, then its training, then step t + 1."""
        edges = []
        for model in self.models:
            trains = [call.name for call in self.calls_of(model) if call.trains]
            readers = [call.name for call in self.calls_of(model) if not call.trains]
            if not trains:
                continue
            edges += [Edge(reader, trains[0], 0, "version") for reader in readers]
            edges += [Edge(a, b, 0, "version") for a, b in pairwise(trains)]
            edges += [Edge(trains[-1], name, 1, "version") for name in [*readers, trains[0]]]
        return edges

    def _follow_edges(self) -> list[Edge]:
        """Edges of models that follow others.

        Such a node comes after the readers of its target in a step and before those of the next step, and between the
        source's training of that step and of the next. With staleness k it comes before the source's training of its
        step, and before the readers of k steps later: it overwrites the version that the readers of its step used.
        """
        edges = []
        for node in self.follows.values():
            trains = [call.name for call in self.calls_of(node.source) if call.trains]
            readers = [call.name for call in self.calls_of(node.target)]
            edges += [Edge(name, node.name, 0, "version") for name in readers]
            edges += [Edge(node.name, name, node.versions, "version") for name in readers]
            is_early = min(node.staleness, 1)
            edges.append(Edge(trains[-1], node.name, is_early, "version"))
            edges.append(Edge(node.name, trains[0], 1 - is_early, "version"))
        return edges


def _check_names(calls: Sequence[ModelFunctionCallDef]) -> None:
    if not calls:
        raise UserError("the experiment's rpcs is empty; return at least one ModelFunctionCallDef")
    seen: dict[str, ModelFunctionCallDef] = {}
    models: dict[str, ModelFunctionCallDef] = {}
    for call in calls:
        if call.name in seen:
            raise UserError(f"two calls are named {call.name!r}; give one of them another name=")
        seen[call.name] = call
        if call.runs_beside:
            continue
        first = models.setdefault(call.model_name, call)
        if first.config != call.config:
            raise UserError(
                f"model_name={call.model_name!r} has two architectures: {first.name} uses {first.config}, "
                f"{call.name} uses {call.config}; calls that share a model name share one set of "
                "parameters, so give them one model_type or two model names"
            )


def _samples_per_prompt(calls: Sequence[ModelFunctionCallDef]) -> int:
    """The responses to a prompt, in all generate calls; 1 where there is none."""
    generating = [call for call in calls if call.generates]
    if not generating:
        return 1
    first, number = generating[0], generating[0].interface_impl.samples_per_prompt
    for call in generating:
        if call.interface_impl.samples_per_prompt != number:
            raise UserError(
                f"{first.name} has samples_per_prompt={number} and {call.name} has "
                f"{call.interface_impl.samples_per_prompt}; samples of a step are numbered by their prompts, so "
                "give all generate calls of a graph one number"
            )
    return number


def _find_producers(calls: Sequence[ModelFunctionCallDef], dataset_keys: tuple[str, ...]) -> dict[str, str]:
    producers: dict[str, str] = {}
    for call in calls:
        for key in call.output_data:
            other = "the data set" if key in dataset_keys else producers.get(key)
            if other:
                raise UserError(f"key {key!r} has two producers, {other} and {call.name}; rename one of the outputs")
            producers[key] = call.name
    known = sorted({*producers, *dataset_keys})
    for call in calls:
        for key in call.input_data:
            if key not in known:
                raise UserError(
                    f"{call.name}: input key {key!r} has no producer; no call lists it in output_data and the "
                    f"data set does not have it; the known keys are {', '.join(known)}"
                )
    return producers


def _sorted_nodes(nodes: Sequence[str], edges: Sequence[Edge]) -> list[str]:
    """The nodes of a step in an order that the edges within it allow; those that could come next are as listed."""
    sorter = TopologicalSorter(dict.fromkeys(nodes, ()))
    for edge in edges:
        if edge.steps_back == 0:
            sorter.add(edge.child, edge.parent)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = " -> ".join(error.args[1])  # each is a parent of the next
        raise UserError(f"the calls form a cycle: {cycle}; remove one of these inputs") from None
    order: list[str] = []
    ready: list[str] = []
    while sorter.is_active():
        ready = sorted([*ready, *sorter.get_ready()], key=nodes.index)
        order.append(ready.pop(0))
        sorter.done(order[-1])
    return order
