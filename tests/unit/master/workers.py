"""Workers that exist in name only: what they are sent is kept, and answered as real ones would."""

from collections.abc import Callable

from realhf.dataflow.graph import DataflowGraph
from realhf.master.loop import Dispatcher
from realhf.rundir.run import Deadlines
from realhf.transport.messages import (
    CallFunction,
    FollowParameters,
    KeyMetadata,
    LoadModel,
    OffloadModel,
    PrepareMove,
    Reallocate,
    Reply,
    SaveCheckpoint,
    Span,
    ToWorker,
)
from tests.unit.api.calls import ppo_graph

GRAPH = ppo_graph()


class Workers:
    """Answers each request at once, as workers on which everything works do."""

    length = staticmethod(lambda key, sample: 3)
    state: Callable[[int, CallFunction], dict[str, float]] = staticmethod(lambda worker, call: {})

    def __init__(
        self,
        num_workers: int,
        graph: DataflowGraph = GRAPH,
        deadlines: Deadlines | None = None,
        on_span: Callable[[int, Span], None] = lambda *_: None,
    ):
        self.graph = graph
        self.now_s = 0.0
        self.dispatcher = Dispatcher(self.send, num_workers, on_span, lambda: self.now_s, deadlines)
        self.got: list[tuple[int, ToWorker]] = []

    async def send(self, worker: int, message: ToWorker) -> None:
        self.got.append((worker, message))
        match message:
            case CallFunction():
                self.dispatcher.reply(worker, self._result(worker, message))
            case PrepareMove() | Reallocate() | FollowParameters() | SaveCheckpoint() | LoadModel() | OffloadModel():
                self.dispatcher.reply(worker, Reply(request_id=message.request_id, span=Span("reallocation", "", 0, 1)))

    def _result(self, worker: int, call: CallFunction) -> Reply:
        span = Span("compute", call.call, float(worker), float(worker + 1))
        _, tp, pp = call.layout.coordinates(worker)
        if (tp, pp) != (0, call.layout.strategy.pp - 1):
            return Reply(request_id=call.request_id, span=span)
        ids = tuple(sample for ids in call.mini_batches for sample in ids)
        outputs = {
            key: KeyMetadata(
                dtype="int64",
                trailing=(),
                ids=ids,
                lengths=tuple(self.length(key, i) for i in ids),
                digests=b"abcdefgh" * len(ids),
            )
            for key in self.graph.calls[call.call].output_data
        }
        return Reply(
            request_id=call.request_id,
            span=span,
            outputs=outputs,
            stats={"ids": (float(sum(ids)), float(len(ids)))},
            tokens=3 * len(ids),
            state=self.state(worker, call),
        )

    def sent(self, kind: type, worker: int | None = None) -> list[ToWorker]:
        return [message for to, message in self.got if isinstance(message, kind) and worker in (None, to)]
