"""Everything that master and workers say to each other. Typed and data only: nothing here is code."""

from typing import Annotated, Literal

import msgspec

from realhf.dataflow.interface import SampleDType
from realhf.geometry.layout import Layout

Split = Literal["train", "evaluation"]
# "sending" and "writing" are beside the rest: on threads of their own.
Phase = Literal[
    "setup", "reallocation", "sending", "offload", "transfer", "compute", "checkpoint", "writing", "waiting"
]
Count = Annotated[int, msgspec.Meta(ge=0)]


class BatchKey(msgspec.Struct, frozen=True, array_like=True):
    """The global batch of one step of training, or one batch of the evaluation rows."""

    split: Split
    step: Count

    def __str__(self) -> str:
        """For people, who count from 1."""
        return f"step {self.step + 1}" if self.split == "train" else f"evaluation batch {self.step + 1}"


class KeyMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What the master knows of a key's data: sample `ids[i]` has a tensor [lengths[i], *trailing] of `dtype`."""

    dtype: SampleDType
    trailing: tuple[Count, ...]
    ids: tuple[Count, ...]
    lengths: tuple[Count, ...]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Something a worker did from `start` to `end`, in seconds since the epoch."""

    phase: Phase
    name: str
    start: float
    end: float


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag is the class name."""


# Master to worker. A worker executes requests one by one in the order in which they come; moves of parameters
# (`Move`) likewise, but beside the others.


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
    """Moves per-sample data between workers, point to point. It is started and not waited for: the
    call that needs the data waits. There is no reply."""

    batch: BatchKey
    sends: tuple[Send, ...] = ()
    receives: tuple[Receive, ...] = ()


class PrepareMove(Message, frozen=True, kw_only=True):
    """Gives memory to what the move of parameters for `name`, a call or a `DataflowGraph.follows`, will write here:
    `model` in `layout`. The worker replies, and executes its next request when that move has ended."""

    request_id: int
    batch: BatchKey
    name: str
    model: str
    layout: Layout


class Reallocate(Message, frozen=True, kw_only=True):
    """Brings a copy of a model's parameters, those of `version`, from its home layout into `layout`. Comes when all who
    need to have prepared for it."""

    request_id: int
    batch: BatchKey
    call: str
    model: str
    layout: Layout
    version: int


class FollowParameters(Message, frozen=True, kw_only=True):
    """Moves the parameters of a model, at home, towards those of the one it follows (`DataflowGraph.follows`). Comes
    when all who need to have prepared for it."""

    request_id: int
    batch: BatchKey
    name: str


class LoadModel(Message, frozen=True, kw_only=True):
    """Brings a model back to the device of its home, from host memory; its optimizer states too, or not."""

    request_id: int
    batch: BatchKey
    model: str
    states: bool


class OffloadModel(Message, frozen=True, kw_only=True):
    """Sends a model, at home, to host memory."""

    request_id: int
    batch: BatchKey
    model: str


class CallFunction(Message, frozen=True, kw_only=True):
    """Runs a model function call on this worker's samples: `mini_batches[j]` are the ids of mini-batch j.

    `version` is that of the parameters, see `DataflowGraph.weights_version`.
    """

    request_id: int
    batch: BatchKey
    call: str
    layout: Layout
    mini_batches: tuple[tuple[Count, ...], ...]
    micro_batches: Count
    version: int


class Release(Message, frozen=True, kw_only=True):
    """Frees the copy of a model's parameters that `Reallocate` made."""

    model: str
    layout: Layout


class FreeBatch(Message, frozen=True, kw_only=True):
    """Forgets all data of a batch."""

    batch: BatchKey


class SaveCheckpoint(Message, frozen=True, kw_only=True):
    """Writes this worker's boxes of `models` below `directory` (`directory`/MODEL/boxes-RANK.safetensors).

    The reply says that they have been copied, so that training may go on; `CheckpointWritten` follows. At the end of
    the run (`is_last`) nothing goes on, and they are written from where they are.
    """

    request_id: int
    directory: str
    models: tuple[str, ...]
    is_last: bool = False


class DumpStacks(Message, frozen=True, kw_only=True):
    """Has the worker write the Python stacks of its threads into the run directory, at once: whatever it computes."""


class Shutdown(Message, frozen=True, kw_only=True):
    """Ends the worker's process."""


# Worker to master.


class Hello(Message, frozen=True, kw_only=True):
    """The first message of a worker."""

    worker: int
    pid: int
    host: str


class Ready(Message, frozen=True, kw_only=True):
    """The worker holds its models on `device` (the name of its GPU, or "CPU") and takes requests."""

    device: str


class Heartbeat(Message, frozen=True, kw_only=True):
    """Sent every second whatever the worker computes; `activity` says what that is."""

    activity: str


class Reply(Message, frozen=True, kw_only=True):
    """A request is done."""

    request_id: int
    span: Span
    # What it waited for before, if it did.
    wait: Span | None = None
    outputs: dict[str, KeyMetadata] = {}
    # (weighted sum, weight) by name; only from ranks that hold outputs.
    stats: dict[str, tuple[float, float]] = {}
    # Tokens of the sequences this call processed, each counted once in its data-parallel group.
    tokens: Count = 0
    # How many steps of training the parameters have seen with which a call ran.
    weights_version: Count = 0
    # The most that models and data took on this worker since its last call, `realhf.worker.memory_use`; 0: not known.
    peak_bytes: Count = 0


class CheckpointWritten(Message, frozen=True, kw_only=True):
    """What `SaveCheckpoint` asked for is on the disk, or could not be written: `error` says why."""

    directory: str
    span: Span
    error: str = ""


class Failure(Message, frozen=True, kw_only=True):
    """A request, or the setup (None), raised. `blames_peer`: the error is that another worker went away."""

    request_id: int | None
    text: str
    blames_peer: bool = False


Move = Reallocate | FollowParameters
Parameters = PrepareMove | LoadModel | OffloadModel | Release
ToWorker = Move | Parameters | Transfer | CallFunction | FreeBatch | SaveCheckpoint | DumpStacks | Shutdown
ToMaster = Hello | Ready | Heartbeat | Reply | CheckpointWritten | Failure
