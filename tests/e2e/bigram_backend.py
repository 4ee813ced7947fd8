"""The smallest engine backend: a model without layers, whose next token depends on the last one alone.

It computes with the embedding and the head of a `DecoderConfig`, on one device. See "An engine backend" in
docs/contributing.md.
"""

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from realhf.engine.arena import Arena
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.build import fill_initial
from realhf.engine.generate.choice import TokenChoice
from realhf.engine.interface import GenerationOutput, GenerationRequest, LossFunction, Postprocess, Stats
from realhf.engine.residency.residency import Boxes, Residency
from realhf.engine.train.optimizer import FlatAdamW
from realhf.geometry.boxes import Box, device_boxes
from realhf.geometry.shards import flat_layout
from realhf.models.checkpoint import CheckpointReader
from realhf.models.checkpoint_index import of_kind, optimizer_steps
from realhf.parallel.vocabulary import Logits


class BigramModel:
    def __init__(self, spec: ModelSpec):
        groups, device = spec.groups, torch.device(spec.device)
        assert groups.layout.strategy.size == 1, "a bigram model is divided over no devices"
        self.config, self.tokens_processed = spec.config, 0
        layout = flat_layout(spec.config, groups.layout, groups.rank)
        self._boxes = {box.name: box for box in device_boxes(spec.config, groups.layout, groups.rank)}
        self._arena = Arena(layout, spec.dtype, device)
        self._parameters = {name: nn.Parameter(view) for name, view in self._arena.views().items()}
        self._optimizer: FlatAdamW | None = None
        if spec.optimizer is not None:
            self._gradient = Arena(layout, spec.dtype, device)
            for name, view in self._gradient.views().items():
                self._parameters[name].grad = view
            self._optimizer = FlatAdamW([self._arena.flat], spec.optimizer, spec.total_optimizer_steps)
        self.residency = Residency(
            [self._arena.flat],
            lambda: [(self._boxes[name], parameter.detach()) for name, parameter in self._parameters.items()],
            versions=spec.versions,
            states=self._optimizer.on_device() if self._optimizer else (),
            gradient=self._gradient.flat if self._optimizer else None,
            on_written=self._optimizer.parameters_changed if self._optimizer else lambda: None,
        )

    @property
    def trains(self) -> bool:
        return self._optimizer is not None

    @property
    def optimizer_steps(self) -> int:
        return self._optimizer.step_count if self._optimizer else 0

    @optimizer_steps.setter
    def optimizer_steps(self, steps: int) -> None:
        self._optimizer.step_count = steps

    def initialise(self, seed: int) -> None:
        fill_initial(self.config, self.residency.held(), seed)
        self.residency.written()

    def state(self) -> Boxes:
        pieces: Boxes = []
        for box, tensor in self.residency.held():
            pieces += [(box, tensor), *self._states(box)]
        return pieces

    def load_state(self, reader: CheckpointReader) -> None:
        assert self._optimizer is not None
        reader.check_architecture(self.config)
        for box, tensor in self.state():
            reader.read_into(tensor, box)
        self.optimizer_steps = optimizer_steps(reader.index, reader.directory)
        self.residency.trained()

    def close(self) -> None:
        """It keeps nothing between calls."""

    def forward(
        self, batch: Batch, tokens_key: str, postprocess: Postprocess, micro_batches: int
    ) -> dict[str, list[Tensor]]:
        outputs = defaultdict(list)
        with torch.no_grad():
            for part in batch.split(micro_batches):
                for key, values in postprocess(self._head(part, tokens_key), part).items():
                    outputs[key] += values
        return dict(outputs)

    def train_step(
        self, batch: Batch, tokens_key: str, loss: LossFunction, weight: Callable[[Batch], float], micro_batches: int
    ) -> Stats:
        assert self._optimizer is not None
        self.residency.trained()
        self._gradient.flat.zero_()
        total_loss, total_weight, sums = 0.0, weight(batch), defaultdict(lambda: (0.0, 0.0))
        for part in batch.split(micro_batches):
            value, stats = loss(self._head(part, tokens_key), part)
            (value / total_weight).backward()
            total_loss += value.item()
            for name, (more, weight_of_more) in stats.items():
                sums[name] = sums[name][0] + more, sums[name][1] + weight_of_more
        norm, lr = self._gradient.flat.norm().item(), self._optimizer.lr
        self._optimizer.step([self._gradient.flat], min(1.0, self._optimizer.config.max_grad_norm / (norm + 1e-6)))
        return {**sums, "loss": (total_loss, total_weight), "grad_norm": (norm, 1.0), "lr": (lr, 1.0)}

    @torch.no_grad()
    def generate(self, batch: Batch, request: GenerationRequest) -> GenerationOutput:
        choice = TokenChoice(batch, request, self._arena.flat.device)
        running, lengths = np.arange(len(batch)), choice.prompt_lengths.copy()
        drawn: list[list[Tensor]] = [[] for _ in running]  # of each sequence: [3], what GenerationOutput has of a token
        while len(running):
            last = torch.from_numpy(choice.tokens[running, lengths[running] - 1])
            draw = choice.draw(self._logits(last).full(), running, lengths[running])
            for i, numbers in zip(
                running, torch.stack([draw.logprobs, draw.untruncated, draw.margins], 1), strict=True
            ):
                drawn[i].append(numbers)
            is_end = choice.accept(draw.tokens.numpy(), running, lengths[running])
            lengths[running] += 1
            running = running[~is_end]
        logprobs, untruncated, margins = ([torch.stack(of_one)[:, i] for of_one in drawn] for i in range(3))
        sequences = [torch.from_numpy(row[:length].copy()) for row, length in zip(choice.tokens, lengths, strict=True)]
        self.tokens_processed += sum(map(len, sequences))
        return GenerationOutput(
            sequences=sequences, logprobs=logprobs, untruncated_logprobs=untruncated, margins=margins
        )

    def _head(self, batch: Batch, tokens_key: str) -> Logits | Tensor:
        """The head's output for the packed tokens of a batch."""
        self.residency.check_here()
        tokens = torch.cat(batch.data[tokens_key])
        self.tokens_processed += len(tokens)
        if self.config.head == "lm":
            return self._logits(tokens)
        return (self._parameters["model.embed_tokens.weight"][tokens] @ self._parameters["score.weight"].T)[:, 0]

    def _logits(self, tokens: Tensor) -> Logits:
        embedding = self._parameters["model.embed_tokens.weight"]
        return Logits(embedding[tokens], self._parameters.get("lm_head.weight", embedding))

    def _states(self, box: Box) -> Boxes:
        if self._optimizer is None:
            return []
        start = self._arena.layout.starts[box.name]
        vectors = self._optimizer.state.items()
        return [(of_kind(box, kind), vector[start : start + box.size].view(box.shape)) for kind, vector in vectors]
