"""Times whole calls of the engine on a short model, to find the overhead beyond the sum of their parts."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from realhf.api.experiment import OptimizerConfig
from realhf.api.generation import GenerationOptions
from realhf.architecture.compute import Computation
from realhf.architecture.model import DecoderConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import PART, Batch
from realhf.engine.generate.loop import packed_weights
from realhf.engine.interface import GenerationRequest, Stats
from realhf.engine.model import ShardedModel
from realhf.engine.train.ordered import OrderedGradient
from realhf.parallel.collectives import all_gather, reduce_scatter
from realhf.parallel.groups import ParallelGroups
from realhf.planning.model.profile import CallOverheads
from realhf.profiling.job import ProfileTarget
from realhf.profiling.model_bench import LAYERS as BENCH_LAYERS
from realhf.profiling.model_bench import ModelBench, Stopwatch, Work

LAYERS = 2  # one a stage where there are two
SEQUENCES = 16  # per data-parallel rank
# Tokens of a sequence of inferences and trainings: of long ones the noise hides what a call takes beyond its parts.
SHORT = 8
FEW, MANY = 1, 4  # micro-batches
STEPS = 8  # in decoding


class CallBench:
    """Finds the overheads of a model type's calls; all ranks make it and call it together.

    The head of inference and train_step is scalar: the cost of the vocabulary belongs to the head, and is measured
    there.

    Args:
        data: groups of the layout of data parallelism alone over all ranks.
        pipeline: groups of a layout of two stages, None where this rank has no part in it.
        lengths: of the SEQUENCES sequences.
    """

    def __init__(
        self,
        target: ProfileTarget,
        data: ParallelGroups,
        pipeline: ParallelGroups | None,
        watch: Stopwatch,
        lengths: list[int],
    ):
        self.model = replace(target.model.with_head("scalar"), num_layers=LAYERS)
        self.target, self.dtype = target, getattr(torch, target.dtype)
        self.compute = Computation(reproducible=target.reproducible)
        self.device, self.watch = watch.device, watch
        self.data, self.pipeline = data, pipeline
        # They begin with different tokens: a common prefix would be computed once.
        sequences = [
            torch.arange(first, first + length, device=watch.device) % self.model.vocab_size
            for first, length in enumerate(lengths)
        ]
        self.batch = Batch(tuple(range(len(lengths))), {"seq": sequences})
        self.short = self.batch.with_data(seq=[sequence[:SHORT] for sequence in sequences])
        self.bench = self._bench(self.model, layers=LAYERS)

    def overheads(self, optimizer_s_per_parameter: float, message_s: float) -> CallOverheads:
        """The seconds of calls beyond their parts.

        The overheads of a call and of a micro-batch come from data-parallel calls of FEW and of MANY micro-batches. The
        overhead of a message comes from a pipeline of two stages, which compute while messages are on their way.

        Args:
            message_s: see `message_s`; 0 if no rank has a part in a pipeline.
        """
        model = self._model(self.data)
        updated = sum(part.stop - part.start for part in model.parameters.updated)
        beyond = optimizer_s_per_parameter * updated + self._exchange_s(model)
        part_s = self._part_s(model)
        forward_call, forward_micro_batch = _split({n: self._forward_rest_s(model, n) for n in (FEW, MANY)})
        train_call, train_micro_batch = _split(
            {n: self._train_rest_s(model, n) - beyond - n * part_s for n in (FEW, MANY)}
        )
        generate_call, per_parameter, decode_step = self._generation()
        return CallOverheads(
            forward_s=forward_call,
            forward_micro_batch_s=forward_micro_batch,
            train_s=train_call,
            train_micro_batch_s=train_micro_batch,
            generate_s=generate_call,
            generate_s_per_parameter=per_parameter,
            decode_step_s=decode_step,
            message_s=self._beyond_message_s(message_s, forward_micro_batch) if message_s else 0.0,
            part_s_per_parameter=part_s / model.parameters.flat.numel(),
        )

    def message_s(self, exchange: Callable[[Tensor], object] | None) -> float:
        """Seconds of one micro-batch's hidden states from rank to rank; `exchange` sends them there and back."""
        tokens = sum(len(sequence) for sequence in self.batch.data["seq"]) // MANY
        hidden = torch.zeros(tokens, self.model.hidden_size, dtype=self.dtype, device=self.device)
        return self.watch.seconds(None if exchange is None else partial(exchange, hidden), slowest=True) / 2

    def _generation(self) -> tuple[float, float, float]:
        """Seconds of a call, of each parameter and of a decode step beyond prefill, decode steps and sampling."""
        lm = self.model.with_head("lm")
        model = ShardedModel(ModelSpec(lm, self.data, self.dtype, self.device, compute=self.compute))
        model.initialise(0)
        bench = self._bench(lm)
        lengths = [len(prompt) for prompt in self.batch.data["seq"]]
        tokens, context = sum(lengths), sum(lengths) // len(lengths)

        def generate_s(new_tokens: int) -> float:
            options = GenerationOptions(max_new_tokens=new_tokens, eos_token=-1)
            return self.watch.seconds(
                lambda: model.generate(self.batch, GenerationRequest(options, prompt_key="seq", sample_key=(0, 0))),
                slowest=True,
            )

        def pack() -> None:
            with packed_weights(model.decoder):
                pass

        pack_s, sampling_s = self.watch.seconds(pack), bench.sampling(SEQUENCES, context)
        head_s = bench.head(SEQUENCES)[0]
        prefill_s = LAYERS * bench.layer(lengths)[0] + bench.embedding(tokens)[0] + head_s + sampling_s
        step_s = LAYERS * bench.decode(SEQUENCES, context) + bench.embedding(SEQUENCES)[0] + head_s + sampling_s
        first_s = generate_s(1)
        decode_step_s = (generate_s(1 + STEPS) - first_s) / STEPS - step_s
        call_s = first_s - prefill_s - pack_s
        return max(call_s, 0.0), pack_s / model.parameters.flat.numel(), max(decode_step_s, 0.0)

    def _beyond_message_s(self, message_s: float, micro_batch_s: float) -> float:
        """A forward pass of two stages has MANY + 1 slots one after the other, with a message in all but one."""
        expected = (MANY + 1) * (self._forward_parts_s(MANY) / 2 + micro_batch_s) + MANY * message_s
        forward = None
        if self.pipeline is not None:
            forward = partial(self._model(self.pipeline).forward, self.batch, "seq", _outputs, MANY)
        return max((self.watch.seconds(forward, slowest=True) - expected) / MANY, 0.0)

    def _exchange_s(self, model: ShardedModel) -> float:
        """Seconds of the slowest rank to exchange the short model's gradients and parameters over the data-parallel
        ranks."""
        parameters, gradients = (torch.zeros_like(x) for x in (model.parameters.flat, model.parameters.gradient))
        ordered = _ordered(model)

        def exchange() -> None:
            if ordered is None:
                reduce_scatter(gradients, self.data.data)
            else:
                ordered.reduce()
            all_gather(parameters, self.data.data)

        return self.watch.seconds(exchange, slowest=True)

    def _part_s(self, model: ShardedModel) -> float:
        """Seconds of a part of a mini-batch beyond its passes: its gradient becomes one of MANY that are added up."""
        if (ordered := _ordered(model)) is None:
            return 0.0

        def add_up() -> None:
            ordered.divided(_in_parts(self.batch, MANY))
            for part in range(MANY):
                ordered.add(part)
            ordered.collect()

        return self.watch.seconds(add_up, slowest=True) / MANY

    def _bench(self, model: DecoderConfig, layers: int = BENCH_LAYERS) -> ModelBench:
        reproducible = self.target.reproducible
        return ModelBench(model, self.target.dtype, self.data, self.watch, layers=layers, reproducible=reproducible)

    def _model(self, groups: ParallelGroups) -> ShardedModel:
        spec = ModelSpec(self.model, groups, self.dtype, self.device, compute=self.compute)
        model = ShardedModel(replace(spec, optimizer=OptimizerConfig(), total_optimizer_steps=1))
        model.initialise(0)
        return model

    def _forward_parts_s(self, micro_batches: int) -> float:
        """Seconds of the parts of an inference that the profile has measured, for one micro-batch."""
        lengths = _lengths(self.batch, micro_batches)
        tokens = sum(lengths)
        return LAYERS * self.bench.layer(lengths)[0] + self.bench.embedding(tokens)[0] + self.bench.head(tokens)[0]

    def _forward_rest_s(self, model: ShardedModel, micro_batches: int) -> float:
        """Seconds of an inference of short sequences beyond its parts."""
        infer, _ = self.bench.parts(_lengths(self.short, micro_batches))
        forward = partial(model.forward, self.short, "seq", _outputs, micro_batches)
        return self.watch.seconds_and_rest(partial(_repeat, infer, micro_batches), forward, slowest=True)[1]

    def _train_rest_s(self, model: ShardedModel, micro_batches: int) -> float:
        """Seconds of a mini-batch of short sequences beyond its passes, with the wait for the slowest rank."""
        _, train = self.bench.parts(_lengths(self.short, micro_batches))
        batch = self.short if _ordered(model) is None else _in_parts(self.short, micro_batches)
        step = partial(model.train_step, batch, "seq", _loss, _weight, micro_batches)
        return self.watch.seconds_and_rest(partial(_repeat, train, micro_batches), step, slowest=True)[1]


def _split(residual: dict[int, float]) -> tuple[float, float]:
    """(a call's, a micro-batch's) seconds, neither below 0, of residuals at FEW and MANY micro-batches."""
    slope = min(max((residual[MANY] - residual[FEW]) / (MANY - FEW), 0.0), max(residual[MANY], 0.0) / MANY)
    return max(residual[FEW] - FEW * slope, 0.0), slope


def _lengths(batch: Batch, micro_batches: int) -> list[int]:
    """The lengths of the sequences in the first of equal micro-batches."""
    return [len(sequence) for sequence in batch.split(micro_batches)[0].data["seq"]]


def _ordered(model: ShardedModel) -> OrderedGradient | None:
    return model.trainer.ordered if model.trainer else None


def _in_parts(batch: Batch, parts: int) -> Batch:
    """The batch as a whole mini-batch with `parts` parts."""
    return batch.with_data(**{PART: [torch.tensor([i * parts // len(batch), parts]) for i in range(len(batch))]})


def _repeat(work: Work, times: int) -> None:
    for _ in range(times):
        work()


def _outputs(head: Tensor, part: Batch) -> dict[str, list[Tensor]]:
    return {"value": list(head.split([len(sequence) for sequence in part.data["seq"]]))}


def _loss(head: Tensor, part: Batch) -> tuple[Tensor, Stats]:
    return head.square().sum(), {"mean": (float(head.detach().sum()), _weight(part))}


def _weight(part: Batch) -> float:
    return float(sum(len(sequence) for sequence in part.data["seq"]))
