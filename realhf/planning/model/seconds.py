"""Seconds of the work of a data-parallel rank in a call."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy, stage_layers
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.rank_work import RankWork
from realhf.planning.model.sizes import model_sizes
from realhf.planning.model.timings import Timings


@dataclass(frozen=True)
class Crossings:
    """Which groups of a layout have members on several nodes, and members of a data-parallel group in one node."""

    tensor: bool
    data: bool
    pipeline: bool
    data_per_node: int = 1


@lru_cache(maxsize=4096)
def crossings(strategy: ParallelStrategy, cluster: Cluster) -> Crossings:
    """Whether groups cross nodes. It depends on the strategy alone: meshes lie in one node or start at one."""
    if strategy.size <= cluster.devices_per_node:
        return Crossings(False, False, False)
    layout = Layout(DeviceMesh(0, strategy.size), strategy)
    dp, tp, pp = range(strategy.dp), range(strategy.tp), range(strategy.pp)
    data_groups = [layout.data_group(t, p) for t in tp for p in pp]
    in_nodes = [Counter(map(cluster.node_of, group)) for group in data_groups]
    data = any(len(nodes) > 1 for nodes in in_nodes)
    return Crossings(
        tensor=any(cluster.crosses_nodes(layout.tensor_group(d, p)) for d in dp for p in pp),
        data=data,
        data_per_node=min(min(nodes.values()) for nodes in in_nodes) if data else 1,
        pipeline=any(cluster.crosses_nodes(layout.pipeline_group(d, t)) for d in dp for t in tp),
    )


class RankSeconds:
    """What the parts of a rank's work take, by the timings of its model; nothing that the call costs as a whole."""

    def __init__(self, work: RankWork, timings: Timings, crosses: Crossings):
        self.placed, self.lengths, self.micro_batches = work.placed, work.lengths, work.parts
        self.model, self.strategy, self.features = work.placed.model, work.placed.strategy, work.placed.features
        self.work, self.timings, self.crosses = work, timings, crosses
        self.sequences = work.samples / work.parts  # of one micro-batch

    def total_s(self) -> float:
        """The whole call, but one mini-batch of a training, without its reduction of sharded operators."""
        if self.work.call.generates:
            return self.generate_s()
        return self.mini_batch_train_s() if self.work.call.trains else self.inference_s()

    def inference_s(self) -> float:
        """A forward pipeline over the micro-batches; the last stage has the head."""
        tokens = self.work.rows
        length = self.lengths.tokens
        pipeline = self._pipeline_s(self._stages(lambda stage: self._stage_s(stage, tokens, length, train=False)))
        return pipeline + self.timings.overheads.forward_s

    def mini_batch_train_s(self) -> float:
        """Forward and backward of the micro-batches (1F1B), reduction of gradients over dp, AdamW.

        With ZeRO-1 gradients are reduce-scattered, 1 / dp of the parameters updated and all-gathered: the bytes of the
        ring all-reduce that it replaces (ZeRO, section 7.2.1).
        """
        tokens = self.work.rows
        strategy, sizes = self.strategy, model_sizes(self.model)
        length = self.lengths.tokens
        pipeline = self._pipeline_s(self._stages(lambda stage: self._stage_s(stage, tokens, length, train=True)))
        parameters = self.placed.elements()
        gradient = self.features.gradient_bytes(self.placed.dtype)
        # Half of the ring's bytes are gradients; the other half are parameters with ZeRO-1, else gradients too.
        size_bytes = parameters * ((gradient + self.placed.item) / 2 if self.features.zero1 else gradient)
        if self.features.fully_sharded:  # for every micro-batch, gathered twice and reduced once
            size_bytes = self.micro_batches * parameters * (2 * self.placed.item + gradient) / 2
        reduce = self.timings.all_reduce(
            size_bytes, strategy.dp, crosses_nodes=self.crosses.data, per_node=self.crosses.data_per_node
        )
        if sizes.tied and strategy.pp > 1:  # both copies of the embedding need the sum of their gradients
            embedding_bytes = sizes.embedding_sharded // strategy.tp * gradient
            reduce += self.timings.all_reduce(embedding_bytes, 2, crosses_nodes=self.crosses.pipeline)
        is_divided = self.features.zero1 or self.features.fully_sharded
        updated = parameters / strategy.dp if is_divided else parameters
        return pipeline + reduce + self._optimizer_s(updated) + self.timings.overheads.train_s

    def _optimizer_s(self, updated: float) -> float:
        """A step on `updated` parameters of a device; states that wait in host memory come and go for it."""
        moved = 2 * updated * self.features.state_bytes(self.placed.dtype) if self.features.offloads_states else 0.0
        return self.timings.optimizer(updated) + moved / self.timings.links.host_bandwidth

    def generate_s(self) -> float:
        """Prefill, which gives the first token, then a decode step for each further token of the longest response. The
        samples of a prompt compute it once.

        With m >= pp micro-batches, pp of them in flight, a decode step of all takes m times the slowest stage: a
        micro-batch's next token waits for its last one to have passed all pp stages, which meanwhile work on the
        others. Fewer samples than stages leave stages idle. Where the KV cache has no room for all, they take turns.
        """
        prompts, length = self.work.prompts, self.lengths.prompt_tokens
        stages = self._stages(
            lambda stage: self._stage_s(stage, prompts * length, length, train=False, head_tokens=self.sequences)
        )
        prefill = self._pipeline_s(stages)
        slowest = max(self._stages(self._decode_stage_s))
        decode_step = max(self.micro_batches, self.strategy.pp) * slowest
        overheads = self.timings.overheads
        parameters = self.placed.elements()
        prefill += overheads.generate_s + parameters * overheads.generate_s_per_parameter
        decode_steps = self.work.cache_turns * max(self.lengths.max_new_tokens - 1, 0)
        return prefill + self.timings.hardware.sampling_s + decode_steps * decode_step

    def _stages(self, seconds: Callable[[int], float]) -> list[float]:
        """`seconds` of every stage; those within the pipeline with equally many layers are alike."""
        examples = _examples_of_stages(self.model.num_layers, self.strategy.pp)
        known = {stage: seconds(stage) for stage in set(examples)}
        return [known[stage] for stage in examples]

    def _pipeline_s(self, stages: list[float]) -> float:
        """All stages once, and the slowest for each further micro-batch.

        (m + pp - 1) slots where the stages are equal (GPipe and 1F1B, Narayanan et al., 2021, section 2.2). With model
        chunks the other stages take 1 / chunks of that, for micro-batches in multiples of pp; what lacks of the last
        multiple is waited for, but for one chunk of each (`realhf.geometry.pipeline_schedule.training_order`).
        """
        slowest, chunks = max(stages), self.strategy.chunks
        lacking = -self.micro_batches % self.strategy.pp if chunks > 1 else 0
        slots = self.micro_batches + lacking * (1 - 1 / chunks)
        return slots * slowest + (sum(stages) - slowest) / chunks

    def _stage_s(
        self, stage: int, tokens: float, length: float, *, train: bool, head_tokens: float | None = None
    ) -> float:
        """One micro-batch of sequences of `length` on one stage: forward, and backward for training; with the messages
        that it receives. The embedding and the head are not recomputed."""
        tp, pp, crosses = self.strategy.tp, self.strategy.pp, self.crosses.tensor
        layers = len(stage_layers(self.model.num_layers, pp, stage))
        overheads = self.timings.overheads
        seconds = overheads.train_micro_batch_s if train else overheads.forward_micro_batch_s
        for backward in (False, True) if train else (False,):
            seconds += layers * self.timings.layer(tokens, length, tp, backward=backward, tp_crosses_nodes=crosses)
            if backward:
                seconds += layers * self._recomputation_s(tokens, length)
            if stage == 0:
                seconds += self.timings.embedding(tokens, tp, backward=backward, tp_crosses_nodes=crosses)
            if stage == pp - 1:
                head = self._head_tokens if head_tokens is None else head_tokens
                seconds += self.timings.head(head, tp, backward=backward, tp_crosses_nodes=crosses)
            first, last = (pp - 1, 0) if backward else (0, pp - 1)
            seconds += self._hops(stage, first, last) * (self._send_s(tokens) + overheads.message_s)
        return seconds

    def _recomputation_s(self, tokens: float, length: float) -> float:
        """What the backward pass of one layer computes again."""
        tp, crosses = self.strategy.tp, self.crosses.tensor
        match self.features.recomputation:
            case "full":
                return self.timings.layer(tokens, length, tp, backward=False, tp_crosses_nodes=crosses)
            case "selective":
                return self.timings.recomputed(tokens, tp, tp_crosses_nodes=crosses)
            case "off":
                return 0.0

    @property
    def _head_tokens(self) -> float:
        """Of one micro-batch of an inference or train_step: those that the head's output is wanted of."""
        only_responses = self.features.response_logits and self.model.head == "lm" and self.lengths.new_tokens > 0
        return self.sequences * (self.lengths.new_tokens if only_responses else self.lengths.tokens)

    def _decode_stage_s(self, stage: int) -> float:
        """One decode step of one micro-batch on one stage."""
        tp, pp, crosses = self.strategy.tp, self.strategy.pp, self.crosses.tensor
        layers = len(stage_layers(self.model.num_layers, pp, stage))
        context = self.lengths.prompt_tokens + self.lengths.max_new_tokens / 2  # in the middle of the response
        sequences = self.sequences / self.work.cache_turns
        layer_s = self.timings.decode_layer(sequences, context, tp, tp_crosses_nodes=crosses)
        seconds = self.timings.overheads.decode_step_s + layers * layer_s
        if stage == 0:
            seconds += self.timings.embedding(sequences, tp, backward=False, tp_crosses_nodes=crosses)
        if stage == pp - 1:
            seconds += self.timings.head(sequences, tp, backward=False, tp_crosses_nodes=crosses)
            seconds += self.timings.hardware.sampling_s
        if pp > 1:  # hidden states from the stage before, or the drawn tokens from the last
            message = self._send_s(sequences) + self.timings.overheads.message_s
            seconds += (2 if self.features.blocking_sends else 1) * message
        return seconds

    def _hops(self, stage: int, first: int, last: int) -> int:
        """Messages of one pass from stage `first` to `last`, round and round, that keep `stage` from computing."""
        chunks = self.strategy.chunks
        received, sent = chunks - (stage == first), chunks - (stage == last)
        return received + (sent if self.features.blocking_sends else 0)

    def _send_s(self, tokens: float) -> float:
        """Hidden states to the next stage; every tensor-parallel rank sends all of them, or its part of the tokens."""
        parts = self.strategy.tp if self.features.sequence_parallel else 1
        size_bytes = tokens * self.model.hidden_size * self.placed.item / parts
        return self.timings.send(size_bytes, crosses_nodes=self.crosses.pipeline)


@lru_cache(maxsize=1024)
def _examples_of_stages(num_layers: int, pp: int) -> tuple[int, ...]:
    """For every stage the first one like it: with as many layers, and at the same end of the pipeline or at none."""
    examples: dict[tuple[int, bool, bool], int] = {}
    kinds = [(len(stage_layers(num_layers, pp, stage)), stage == 0, stage == pp - 1) for stage in range(pp)]
    return tuple(examples.setdefault(kind, stage) for stage, kind in enumerate(kinds))
