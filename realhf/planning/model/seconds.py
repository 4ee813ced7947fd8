"""Seconds of the work of a data-parallel rank in a call."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

from realhf.architecture.chunks import OPTIMIZER_ELEMENTS
from realhf.architecture.compute import Recomputation
from realhf.architecture.decoding import num_buckets
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy, chunk_layers, stage_layers
from realhf.geometry.operators import EMBEDDING, HEAD
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.lengths import DecodePhase
from realhf.planning.model.osdp.exchange import Exchange
from realhf.planning.model.profile import CollectiveKind
from realhf.planning.model.rank_work import RankWork
from realhf.planning.model.sizes import model_sizes, operator_parts
from realhf.planning.model.timings import ProfiledTimings, TensorGroup, Timings


@dataclass(frozen=True)
class Crossings:
    """Which groups of a layout have members on several nodes, members of a data-parallel group in one node, and devices
    of a node that send to a stage on another one."""

    tensor: bool
    data: bool
    pipeline: bool
    data_per_node: int = 1
    senders: int = 1


@lru_cache(maxsize=4096)
def crossings(strategy: ParallelStrategy, cluster: Cluster) -> Crossings:
    """Whether groups cross nodes. It depends on the strategy alone: meshes lie in one node or start at one."""
    layout = Layout(DeviceMesh(0, strategy.size), strategy)
    dp, tp, pp = range(strategy.dp), range(strategy.tp), range(strategy.pp)
    data_groups = [layout.data_group(t, p) for t in tp for p in pp]
    in_nodes = [Counter(map(cluster.node_of, group)) for group in data_groups]
    data = any(len(nodes) > 1 for nodes in in_nodes)
    pipelines = [[cluster.node_of(device) for device in layout.pipeline_group(d, t)] for d in dp for t in tp]
    # The last stage sends to the first one as well.
    sending = Counter(a for nodes in pipelines for a, b in zip(nodes, [*nodes[1:], nodes[0]], strict=True) if a != b)
    return Crossings(
        tensor=any(cluster.crosses_nodes(layout.tensor_group(d, p)) for d in dp for p in pp),
        data=data,
        data_per_node=min(min(nodes.values()) for nodes in in_nodes) if data else 1,
        pipeline=bool(sending),
        senders=max(sending.values(), default=1),
    )


class RankSeconds:
    """What the parts of a rank's work take, by the timings of its model; nothing that the call costs as a whole."""

    def __init__(self, work: RankWork, timings: Timings, crosses: Crossings):
        self.placed, self.lengths, self.micro_batches = work.placed, work.lengths, work.parts
        self.model, self.strategy, self.features = work.placed.model, work.placed.strategy, work.placed.features
        self.work, self.timings, self.crosses = work, timings, crosses
        self.group = TensorGroup(self.strategy.tp, crosses.tensor)
        self.sequences = work.computed / work.parts  # in one micro-batch

    def total_s(self) -> float:
        """The whole call, but one mini-batch of a training."""
        if self.work.call.generates:
            return self.generate_s()
        return self.mini_batch_train_s() if self.work.call.trains else self.inference_s()

    def inference_s(self) -> float:
        """A forward pipeline over the micro-batches; the last stage has the head."""
        tokens = self.work.rows
        length = self.lengths.attended
        pipeline = self._pipeline_s(self._stages(lambda stage: self._stage_s(stage, tokens, length, train=False)))
        return pipeline + self.timings.overheads.forward_s

    def mini_batch_train_s(self) -> float:
        """Forward and backward of the micro-batches (1F1B), what data parallelism exchanges, AdamW."""
        tokens, strategy, length = self.work.rows, self.strategy, self.lengths.attended
        pipeline = self.work.once(
            ("pipeline", strategy.chunks, self.crosses.tensor, self.crosses.pipeline, self.crosses.senders),
            lambda: self._pipeline_s(self._stages(lambda stage: self._stage_s(stage, tokens, length, train=True))),
        )
        overheads_s = self.timings.overheads.train_s + self.timings.hardware.mini_batch_s
        if self.features.ordered:  # each part's gradient is taken and added, and those of the other ranks are
            overheads_s += self.timings.parts(self.micro_batches + strategy.dp - 1, self.placed.gradient_elements())
        return pipeline + self._exchange_s() + self._optimizer_s(self._updated()) + overheads_s

    def _exchange_s(self) -> float:
        """Gradients and parameters over dp, of the stage that takes longest, and gradients of tied embeddings.

        With ZeRO-1 gradients are reduce-scattered, 1 / dp of the parameters updated and all-gathered: the bytes of the
        ring all-reduce that it replaces (ZeRO, section 7.2.1).
        """
        strategy, sizes, stages = self.strategy, model_sizes(self.model), self.placed.stages
        gradient = self.features.gradient_bytes(self.placed.dtype)
        if stages:
            exchange_s = max(self.exchange(number).mini_batch_s(stage) for number, stage in enumerate(stages))
        else:
            exchange_s = self._of_all_s(gradient)
        if sizes.tied and strategy.pp > 1:  # both copies of the embedding need the sum of their gradients
            embedding_bytes = sizes.embedding_sharded // strategy.tp * gradient
            crosses = self.crosses.pipeline
            exchange_s += self.timings.collective("all_reduce", embedding_bytes, 2, crosses_nodes=crosses)
        return exchange_s

    def _of_all_s(self, gradient: int) -> float:
        """Where all operators are in one mode."""
        parameters, all_reduce = self.placed.elements(), self._over_data("all_reduce")
        if self.features.fully_sharded:  # for every micro-batch, gathered twice and reduced once: each half a ring
            return all_reduce(self.micro_batches * parameters * (2 * self.placed.item + gradient) / 2)
        if self.features.ordered:  # every rank gets the gradients of all
            gathered_bytes = self.strategy.dp * self.placed.gradient_elements() * gradient
            gathered_s = self._over_data("all_gather")(gathered_bytes)
            return gathered_s + self._over_data("all_gather")(parameters * self.placed.item)
        if self.features.zero1:
            reduced_s = self._over_data("reduce_scatter")(parameters * gradient)
            return reduced_s + self._over_data("all_gather")(parameters * self.placed.item)
        return all_reduce(parameters * gradient)

    def exchange(self, stage: int) -> Exchange:
        """What data parallelism exchanges on a stage where operators have modes of their own. Behind computation a
        gather is hidden on GPUs alone (`EngineFeatures.prefetch`)."""
        hides = self.features.prefetch and self.features.on_gpus
        return Exchange(
            all_reduce=self._over_data("all_reduce"),
            all_gather=self._over_data("all_gather"),
            reduce_scatter=self._over_data("reduce_scatter"),
            micro_batches=self.micro_batches,
            item=self.placed.item,
            gradient=self.features.gradient_bytes(self.placed.dtype),
            recomputes=self.recomputed_layers(stage) if self.features.recomputation == "full" else frozenset(),
            forward_s=self._operators_s(stage, backward=False) if hides else {},
            backward_s=self._operators_s(stage, backward=True) if hides else {},
        )

    def recomputed_layers(self, stage: int) -> frozenset[int]:
        """The layers of a stage whose forward pass is run again."""
        chunks, recomputed = chunk_layers(self.model.num_layers, self.strategy, stage), self.features.recomputed
        return frozenset(layer for chunk in chunks for layer in chunk[: recomputed.count(len(chunk))])

    def _over_data(self, kind: CollectiveKind) -> Callable[[float], float]:
        """A collective of the data-parallel group, by the bytes of its vector."""
        collective, dp, crosses = self.timings.collective, self.strategy.dp, self.crosses
        return lambda size_bytes: collective(
            kind, size_bytes, dp, crosses_nodes=crosses.data, per_node=crosses.data_per_node
        )

    def _operators_s(self, stage: int, *, backward: bool) -> dict[str, float]:
        """What an operator of each kind takes of one micro-batch: a layer's seconds by the parameters that a token goes
        through."""
        tokens = self.work.rows
        layer_s = self.timings.layer(tokens, self.lengths.attended, self.group, backward=backward, trains=True)
        seconds = {kind: part * layer_s for kind, part in operator_parts(self.model).items()}
        if stage == 0:
            seconds[EMBEDDING] = self.timings.embedding(tokens, self.group, backward=backward)
        if stage == self.strategy.pp - 1:
            seconds[HEAD] = self.timings.head(self._head_tokens, self.group, backward=backward)
        return seconds

    def _updated(self) -> float:
        """Parameters that a device updates."""
        if self.placed.stages:
            return max(stage.updated for stage in self.placed.stages)
        is_divided = self.features.zero1 or self.features.fully_sharded
        return self.placed.elements() / self.strategy.dp if is_divided else self.placed.elements()

    def _optimizer_s(self, updated: float) -> float:
        """A step on `updated` parameters of a device; states that wait in host memory come and go for it.

        Links carry both directions at once, so two chunks in turns take half of the summed time; only the coming of the
        first chunk and the going of the last hide nothing (`realhf.engine.train.staging`).
        """
        update_s = self.timings.optimizer(updated)
        if not self.features.offloads_states:
            return update_s
        moved = 2 * updated * self.features.state_bytes(self.placed.dtype)
        in_turns = 1 + min(OPTIMIZER_ELEMENTS / max(updated, 1), 1.0)
        return in_turns / 2 * (update_s + moved / self.timings.links.host_bandwidth)

    def generate_s(self) -> float:
        """Prefill, which gives the first token, then a decode step for each further token of the longest response,
        while the batch shrinks as responses end. The samples of a prompt compute it once.

        With m >= pp micro-batches, pp of them in flight, a decode step of all takes m times the slowest stage: a
        micro-batch's next token waits for its last one to have passed all pp stages, which meanwhile work on the
        others. Fewer samples than stages leave stages idle. Where the KV cache has no room for all, they take turns,
        and those that are preempted are computed again.
        """
        tokens, length = self.work.prompts * self.lengths.prompt_tokens, self.lengths.attended_prompt
        stages = self._stages(
            lambda stage: self._stage_s(stage, tokens, length, train=False, head_tokens=self.sequences)
        )
        prefill = self._pipeline_s(stages)
        overheads = self.timings.overheads
        parameters = self.placed.elements()
        prefill += overheads.generate_s + parameters * overheads.generate_s_per_parameter
        decodes = 0.0
        for phase in self.work.decode_phases:
            slowest = max(self._stages(partial(self._decode_stage_s, phase)))
            decodes += phase.steps * (max(self.micro_batches, self.strategy.pp) * slowest)
        prefill += self._recording_s + self._again_s()
        return prefill + self.timings.hardware.sampling_s + decodes

    def _again_s(self) -> float:
        """What is computed again of sequences that were preempted, and of prompts whose samples begin one by one."""
        turns = self.work.turns
        if not turns or not turns.again_tokens:
            return 0.0
        stages = self._stages(
            lambda stage: self._stage_s(
                stage, turns.again_tokens, turns.again_length, train=False, head_tokens=turns.preemptions
            )
        )
        return self.work.parts_in_flight * max(stages)

    @property
    def _recording_s(self) -> float:
        """What graphs cost more that live for one call: the first step of each number of rows is launched kernel by
        kernel in place of a graph, and its second one is recorded, which takes as long as to launch the kernels. Graphs
        of a home whose parameters are gathered go with these. A batch that shrinks goes through all numbers of rows."""
        features, lengths = self.features, self.lengths
        keeps = lengths.decode_graphs == "kept" and not features.divides_parameters
        if not features.cuda_graphs or lengths.decode_graphs == "off" or keeps:
            return 0.0
        steps = sum(phase.steps for phase in self.work.decode_phases)
        first = min(num_buckets(math.ceil(self.sequences)) if lengths.responses else 1, steps)
        hardware, layers = self.timings.hardware, len(stage_layers(self.model.num_layers, self.strategy.pp, 0))
        launched = hardware.decode_launch_s - hardware.decode_graph_launch_s
        recorded_s = first * launched + min(first, steps - first) * hardware.decode_launch_s
        return self.work.parts_in_flight * layers * recorded_s

    def _stages(self, seconds: Callable[[int], float]) -> list[float]:
        """`seconds` of every stage; those within the pipeline with equally many layers are alike."""
        examples = _examples_of_stages(self.model.num_layers, self.strategy.pp)
        known = {stage: seconds(stage) for stage in set(examples)}
        return [known[stage] for stage in examples]

    def _pipeline_s(self, stages: list[float]) -> float:
        """All stages once, and the slowest for each further micro-batch.

        (m + pp - 1) slots where the stages are equal (GPipe and 1F1B, Narayanan et al., 2021, section 2.2). With model
        chunks the other stages take 1 / chunks of that, for micro-batches in multiples of pp; what lacks of the last
        multiple is waited for, but for one chunk of each (`realhf.geometry.pipeline_schedule.training_order`). The
        other stages count once for each pipeline that fills and drains by itself (`EngineFeatures.drains_pipelines`).
        """
        slowest, chunks = max(stages), self.strategy.chunks
        lacking = -self.micro_batches % self.strategy.pp
        slots = self.micro_batches + lacking * (1 - 1 / chunks)
        drains = self.features.drains_pipelines and not self.work.call.trains
        pipelines = math.ceil(self.micro_batches / self.strategy.pp) if drains else 1
        return slots * slowest + pipelines * (sum(stages) - slowest) / chunks

    def _stage_s(
        self, stage: int, tokens: float, length: float, *, train: bool, head_tokens: float | None = None
    ) -> float:
        """One micro-batch of sequences of `length` on one stage: forward, and backward for training; with the messages
        that it receives. The embedding and the head are not recomputed."""
        pp, message_s = self.strategy.pp, self._send_s(tokens) + self.timings.overheads.message_s
        hops = self._hops(stage, 0, pp - 1) + (self._hops(stage, pp - 1, 0) if train else 0)
        return self._computed_s(stage, tokens, length, train=train, head_tokens=head_tokens) + hops * message_s

    def _computed_s(self, stage: int, tokens: float, length: float, *, train: bool, head_tokens: float | None) -> float:
        """`_stage_s` without messages: the same for many options, as for twice dp and half the micro-batches."""
        pp, features = self.strategy.pp, self.features
        layers = len(stage_layers(self.model.num_layers, pp, stage))
        head = self._head_tokens if head_tokens is None else head_tokens
        again = len(self.recomputed_layers(stage)) if train else 0
        place = (layers, again, stage == 0, stage == pp - 1, head, self.group)
        key = (place, tokens, length, train, features.recomputation, features.sequence_parallel)
        if key in self.work.known:
            return self.work.known[key]
        overheads = self.timings.overheads
        seconds = overheads.train_micro_batch_s if train else overheads.forward_micro_batch_s
        seconds += again * self._layer_s(tokens, length, train, features.recomputation)
        seconds += (layers - again) * self._layer_s(tokens, length, train, "off")
        for backward in (False, True) if train else (False,):
            if stage == 0:
                seconds += self.timings.embedding(tokens, self.group, backward=backward)
            if stage == pp - 1:
                seconds += self.timings.head(head, self.group, backward=backward)
        self.work.known[key] = seconds
        return seconds

    def _layer_s(self, tokens: float, length: float, train: bool, recomputation: Recomputation) -> float:
        """One layer, forward, and backward with what it computes again for training: much the same for many options."""
        key = ("layer", tokens, length, self.group, train, recomputation, self.features.sequence_parallel)
        if key in self.work.known:
            return self.work.known[key]
        seconds = 0.0
        for backward in (False, True) if train else (False,):
            seconds += self.timings.layer(tokens, length, self.group, backward=backward, trains=train)
            if train:
                seconds += self._unmeasured_s
        if recomputation == "full":
            seconds += self.timings.layer(tokens, length, self.group, backward=False, trains=True)
        elif recomputation == "selective":
            seconds += self.timings.recomputed(tokens, self.group)
        self.work.known[key] = seconds
        return seconds

    @cached_property
    def _unmeasured_s(self) -> float:
        """What sequence parallelism adds to a layer that was measured without, each way: each of its two all-reduces
        becomes an all-gather and a reduce-scatter of the same bytes, so that ranks wait for one another once more."""
        if not (self.features.sequence_parallel and isinstance(self.timings, ProfiledTimings)):
            return 0.0
        return 2 * self.timings.collective("all_reduce", 0.0, self.strategy.tp, crosses_nodes=self.crosses.tensor)

    @property
    def _head_tokens(self) -> float:
        """The tokens of a micro-batch of an inference or train_step that need the head's output."""
        only_responses = self.features.response_logits and self.model.head == "lm" and self.lengths.new_tokens > 0
        return self.sequences * (self.lengths.new_tokens if only_responses else self.lengths.tokens)

    def _decode_stage_s(self, phase: DecodePhase, stage: int) -> float:
        """One decode step of one micro-batch on one stage."""
        pp = self.strategy.pp
        layers = len(stage_layers(self.model.num_layers, pp, stage))
        context = self.lengths.prompt_tokens + phase.tokens
        sequences = self.sequences * phase.share
        layer_s = self.timings.decode_layer(sequences, context, self.group)
        seconds = self.timings.overheads.decode_step_s + layers * layer_s
        if stage == 0:
            seconds += self.timings.embedding(sequences, self.group, backward=False)
        if stage == pp - 1:
            seconds += self.timings.head(sequences, self.group, backward=False)
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
        return self.timings.send(size_bytes, crosses_nodes=self.crosses.pipeline, senders=self.crosses.senders)


@lru_cache(maxsize=1024)
def _examples_of_stages(num_layers: int, pp: int) -> tuple[int, ...]:
    """For every stage the first one like it: with as many layers, and at the same end of the pipeline or at none."""
    examples: dict[tuple[int, int | None], int] = {}
    found = []
    for stage in range(pp):
        kind = len(stage_layers(num_layers, pp, stage)), stage if stage in (0, pp - 1) else None
        found.append(examples.setdefault(kind, stage))
    return tuple(found)
