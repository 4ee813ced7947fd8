"""All messages between master and workers. They are typed data: a message never contains code."""

from typing import Annotated, Literal

import msgspec

from realhf.architecture.decoding import GraphLife
from realhf.dataflow.interface import SampleDType
from realhf.dataflow.splits import Split
from realhf.geometry.layout import Layout
from realhf.rewards.details import NO_DETAILS, RewardDetails

# "sending", "writing" and "beside" (calls beside the devices) run on threads of their own, beside the other phases.
Phase = Literal[
    "setup",
    "reallocation",
    "sending",
    "offload",
    "transfer",
    "digest",
    "compute",
    "checkpoint",
    "writing",
    "beside",
    "waiting",
]
Count = Annotated[int, msgspec.Meta(ge=0)]


class BatchKey(msgspec.Struct, frozen=True, array_like=True):
    """The global batch of one step of training, or one batch of the rows of an evaluation set."""

    split: Split
    step: Count

    def __str__(self) -> str:
        """For people: counted from 1."""
        return f"step {self.step + 1}" if self.split == "train" else f"{self.split} batch {self.step + 1}"


class KeyMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the data of a key to the master: sample `ids[i]` has a tensor [lengths[i], *trailing] of `dtype`.

    `digests`: of the values that a call has made, 8 bytes a sample. None to a receiver.
    """

    dtype: SampleDType
    trailing: tuple[Count, ...]
    ids: tuple[Count, ...]
    lengths: tuple[Count, ...]
    digests: bytes = b""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """An activity of a worker from `start` to `end`, in seconds since the epoch."""

    phase: Phase
    name: str
    start: float
    end: float


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag is the class name."""


# Master to worker. A worker executes requests one by one, in the order in which they arrive. It executes moves of
# parameters (`Move`) in their order too, beside the other requests, and so it does calls beside the devices when it has
# come to them.


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a transfer: the data of `key` of samples `ids` goes to `peer`."""

    peer: Count
    key: str
    ids: tuple[Count, ...]


class Receive(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a transfer: the data described by `metadata` comes from `peer`."""

    peer: Count
    key: str
    metadata: KeyMetadata


class Transfer(Message, frozen=True, kw_only=True):
    """Moves per-sample data between workers, point to point. The worker only starts it, and does not reply; the call
    that needs the data waits for it."""

    batch: BatchKey
    sends: tuple[Send, ...] = ()
    receives: tuple[Receive, ...] = ()


class PrepareMove(Message, frozen=True, kw_only=True):
    """Allocates memory for the parameters of `model` in `layout`, which the move for `name` will write: a call, or a
    node of `DataflowGraph.follows`. The worker replies, and executes its next request when the move has ended."""

    request_id: int
    batch: BatchKey
    name: str
    model: str
    layout: Layout


class Reallocate(Message, frozen=True, kw_only=True):
    """Copies version `version` of a model's parameters from its home, or from the copy that the plan names
    (`CallPlan.copy_from`), into `layout`. It is sent when all workers that must prepare for it have done so."""

    request_id: int
    batch: BatchKey
    call: str
    model: str
    layout: Layout
    version: int


class FollowParameters(Message, frozen=True, kw_only=True):
    """Moves the parameters of a model, in its home, towards those of the model that it follows
    (`DataflowGraph.follows`). It is sent when all workers that must prepare for it have done so."""

    request_id: int
    batch: BatchKey
    name: str


class LoadModel(Message, frozen=True, kw_only=True):
    """Loads a model from host memory to the device of its home, with `states` its optimizer states too."""

    request_id: int
    batch: BatchKey
    model: str
    states: bool


class OffloadModel(Message, frozen=True, kw_only=True):
    """Moves a model from the device of its home to host memory."""

    request_id: int
    batch: BatchKey
    model: str


class CallFunction(Message, frozen=True, kw_only=True):
    """Runs a model function call on this worker's samples: `mini_batches[j]` are the ids of mini-batch j.

    `version` is the version of the parameters to use, see `DataflowGraph.weights_version`, and `makes_version` the one
    that a training makes, if it is the last one of the step; `decode_graphs`: how long
    they live by the plan, and `kv_cache_tokens` the room that it gives for keys and values; `state` has the numbers
    that the call left in the step before (`realhf.engine.interface.Context.state`); `trained_steps`: of an evaluation,
    the training steps before it.
    """

    request_id: int
    batch: BatchKey
    call: str
    layout: Layout
    mini_batches: tuple[tuple[Count, ...], ...]
    micro_batches: Count
    version: int
    makes_version: Count | None = None
    decode_graphs: GraphLife | None = None
    kv_cache_tokens: Count | None = None
    state: dict[str, float] = {}
    trained_steps: Count = 0


class Release(Message, frozen=True, kw_only=True):
    """A call is done with the copy of a model's parameters that `Reallocate` made. It is freed, unless other calls are
    still to take theirs from it."""

    model: str
    layout: Layout


class FreeBatch(Message, frozen=True, kw_only=True):
    """Forgets all data of a batch."""

    batch: BatchKey


class SaveCheckpoint(Message, frozen=True, kw_only=True):
    """Writes this worker's boxes of `models` below `directory` (`directory`/MODEL/boxes-RANK.safetensors).

    The worker replies when it has copied them, so that training may go on; `CheckpointWritten` follows. At the end of
    the run (`is_last`) it writes them without a copy.
    """

    request_id: int
    directory: str
    models: tuple[str, ...]
    is_last: bool = False


class DumpStacks(Message, frozen=True, kw_only=True):
    """The worker writes the Python stacks of its threads into the run directory at once, even while it computes."""


class Alive(Message, frozen=True, kw_only=True):
    """The master is there: the answer to `Hello`, and then sent every few seconds."""


class Shutdown(Message, frozen=True, kw_only=True):
    """Ends the worker's process."""


class StoreReply(Message, frozen=True, kw_only=True):
    """The answer to a `StoreRequest`: the value of a key, or a number. `error`: why it was refused."""

    request_id: Count
    value: bytes = b""
    number: int = 0
    error: str = ""


# Worker to master.


class StoreRequest(Message, frozen=True, kw_only=True):
    """Base of the operations on the run's store, `realhf.master.key_value_store`."""

    request_id: Count


class SetKey(StoreRequest, frozen=True, kw_only=True):
    key: str
    value: bytes


class AddToKey(StoreRequest, frozen=True, kw_only=True):
    key: str
    amount: int


class WaitForKeys(StoreRequest, frozen=True, kw_only=True):
    """It is answered when all `keys` are there, with the value of the last one."""

    keys: tuple[str, ...]


class CheckKeys(StoreRequest, frozen=True, kw_only=True):
    keys: tuple[str, ...]


class Hello(Message, frozen=True, kw_only=True):
    """The first message of a worker, with the id of the start that it belongs to."""

    worker: int
    pid: int
    host: str
    start_id: str = ""


class Ready(Message, frozen=True, kw_only=True):
    """The worker holds its models on `device` (the name of its GPU, or "CPU") and takes requests."""

    device: str


class Heartbeat(Message, frozen=True, kw_only=True):
    """Sent every second, also while the worker computes; `activity` describes what it does. `sent_s`: when, in seconds
    since the epoch by the worker's clock; None: not told."""

    activity: str
    sent_s: float | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model's response to a prompt, for people: sample `sample` of the batch as texts, with its reward and its
    details."""

    sample: Count
    prompt: str
    response: str
    reward: float | None
    details: RewardDetails = NO_DETAILS


class Reply(Message, frozen=True, kw_only=True):
    """A request is done."""

    request_id: int
    span: Span
    # The wait before it, if there was one.
    wait: Span | None = None
    outputs: dict[str, KeyMetadata] = {}
    # (weighted sum, weight) by name; only from ranks that hold outputs.
    stats: dict[str, tuple[float, float]] = {}
    # The numbers that the call keeps for the next step; only from ranks that hold outputs.
    state: dict[str, float] = {}
    # A few of the samples that the call has given rewards.
    completions: tuple[Completion, ...] = ()
    # Tokens of the sequences this call processed, each counted once in its data-parallel group.
    tokens: Count = 0
    # How many training steps the parameters that a call used have seen.
    weights_version: Count = 0
    # The bit sums of the parameters here that a call used, and of those that it made: of each box, in the order of
    # their names and offsets.
    used_weights: tuple[Count, ...] = ()
    made_weights: tuple[Count, ...] = ()
    # The same of the optimizer states that this rank writes into checkpoints, and last the number of optimizer steps.
    used_states: tuple[Count, ...] = ()
    made_states: tuple[Count, ...] = ()
    # When they were summed up.
    digests: tuple[Span, ...] = ()
    # Peak memory of models and data on this worker since its last call (`realhf.worker.memory_use`); 0: not known.
    peak_bytes: Count = 0
    # Messages that this worker sent in collectives of data parallelism, by name
    # (`realhf.parallel.collectives.Traffic`).
    sent_bytes: dict[str, Count] = {}
    # Of the copy that the call used, where it gets only what changed: `realhf.realloc.execute.changes`.
    moved: dict[str, Count] = {}


class CheckpointWritten(Message, frozen=True, kw_only=True):
    """The boxes of a `SaveCheckpoint` are on the disk, or could not be written; `error` is the reason."""

    directory: str
    span: Span
    error: str = ""


class Failure(Message, frozen=True, kw_only=True):
    """An error was raised: by a call beside the devices (its request), by the present work of the worker or by its
    setup (None). `blames_peer`: the error is that another worker is gone."""

    request_id: int | None
    text: str
    blames_peer: bool = False


Move = Reallocate | FollowParameters
Parameters = PrepareMove | LoadModel | OffloadModel | Release
Control = DumpStacks | Alive | StoreReply | Shutdown
ToWorker = Move | Parameters | Transfer | CallFunction | FreeBatch | SaveCheckpoint | Control
OnStore = SetKey | AddToKey | WaitForKeys | CheckKeys
ToMaster = Hello | Ready | Heartbeat | Reply | CheckpointWritten | Failure | OnStore
