"""Sequences that are generated together: carries out the decisions of their scheduler on this stage."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from realhf.engine.generate.choice import DrawnTokens, TokenChoice
from realhf.engine.generate.decode_graphs import DecodeGraphs
from realhf.engine.generate.kv_cache import KVCache, PrefillRows, StepAttention
from realhf.engine.generate.paged_attention import DecodeRows
from realhf.engine.interface import GenerationOutput
from realhf.geometry.batching import RunningSequence, Scheduler, Step, pages_for
from realhf.models.attention import packed_positions
from realhf.models.decoder import Decoder
from realhf.parallel.vocabulary import Logits


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a stage: `tokens` [rows] int64 (first stage), their `positions` [rows], and the rows whose logits
    the last stage computes (None: all)."""

    tokens: Tensor | None
    positions: Tensor
    attend: StepAttention
    head_rows: Tensor | None


class RunningBatch:
    """The steps of its sequences on this stage: `admit`, `forward`, `draw` (last stage), `accept`, `release`.

    All stages see all tokens, hence decide the same.
    """

    def __init__(
        self,
        decoder: Decoder,
        choice: TokenChoice,
        scheduler: Scheduler,
        cache: KVCache,
        *,
        return_logits: bool,
        graphs: DecodeGraphs | None = None,
    ):
        self.decoder, self.choice, self.scheduler, self.cache = decoder, choice, scheduler, cache
        self.graphs = graphs
        self.return_logits = return_logits
        self.device = next(decoder.parameters()).device
        width = max(pages_for(length, cache.kernels.page) for length in choice.longest().tolist())
        self._table = np.zeros((scheduler.limits.max_running, width), dtype=np.int32)
        self._drawn = DrawnTokens()
        self.steps = 0

    @property
    def is_done(self) -> bool:
        return self.scheduler.is_done

    def admit(self) -> Step:
        """Decides which sequences compute in the next step, and gives them their pages; keeps the step."""
        self.step = step = self.scheduler.plan()
        for sequence in (*step.grown, *(member for prefill in step.prefills for member in prefill.members)):
            self._table[sequence.slot, : len(sequence.pages)] = sequence.pages
        drawing = step.drawing
        self._sequences = np.array([s.index for s in drawing])
        self._lengths = np.array([s.length for s in drawing])
        return step

    def inputs(self) -> StepInputs:
        """The step's tensors on the device."""
        step, decodes = self.step, len(self.step.decodes)
        decode = prefill = None
        positions = [torch.from_numpy(self._lengths[:decodes] - 1)]
        if decodes:
            cached = positions[0].to(self.device, self.cache.kernels.lengths_dtype)
            decode = DecodeRows(torch.from_numpy(self._decode_table()).to(self.device), cached)
        if step.prefills:
            lengths = [p.length for p in step.prefills]
            positions.append(packed_positions(lengths))
            page = self.cache.kernels.page
            places = [torch.from_numpy(_places(p.members[0], p.length, page)) for p in step.prefills]
            prefill = PrefillRows(lengths, torch.cat(places).to(self.device))
        return StepInputs(
            tokens=self._tokens() if self.decoder.groups.is_first_stage else None,
            positions=torch.cat(positions).to(self.device),
            attend=StepAttention(self.cache, decode, prefill, in_order=self.decoder.leaves is not None),
            head_rows=self._head_rows() if self.decoder.groups.is_last_stage else None,
        )

    def forward(self, hidden: Tensor | None) -> Tensor:
        """This stage on the step's tokens, or on the previous stage's `hidden` [rows, hidden].

        Returns hidden states, or on the last stage logits [drawing, vocab], complete on every tensor-parallel rank.
        """
        if self.graphs is not None and not self.step.prefills:
            x = self._tokens() if hidden is None else hidden
            return self.graphs(x, self._lengths - 1, self._decode_table())
        inputs = self.inputs()
        given = inputs.tokens if hidden is None else hidden
        out = self.decoder(given, inputs.positions, inputs.attend, inputs.head_rows)
        self.cache.copy_pages(self.step.copies)
        return out.full() if isinstance(out, Logits) else out

    def draw(self, logits: Tensor) -> Tensor:
        """Draws a token for every drawing sequence and records it: [drawing] int64.

        The first of the tensor-parallel ranks draws for all: kernels of GPUs may differ in the last bits.
        """
        groups = self.decoder.groups
        tokens = torch.empty(len(self._sequences), dtype=torch.int64, device=self.device)
        if groups.tp_index == 0:
            drawn = self.choice.draw(logits, self._sequences, self._lengths)
            if groups.holds_outputs:
                kept = (logits if self.graphs is None else logits.clone()) if self.return_logits else None
                self._drawn.add(self._sequences, drawn, kept)
            tokens = drawn.tokens
        if groups.tensor is not None:
            dist.broadcast(tokens, group=groups.tensor, group_src=0)
        return tokens

    def accept(self, tokens: Tensor) -> np.ndarray:
        """Appends the step's tokens [drawing] to their sequences; [drawing] bool: the sequence ends with it."""
        return self.choice.accept(tokens.cpu().numpy(), self._sequences, self._lengths)

    def release(self, is_end: np.ndarray) -> None:
        """Ends the step: sequences that have ended give their places and pages back."""
        self.scheduler.advance(is_end.tolist())
        self.steps += 1

    def output(self, prompts: Sequence[Tensor]) -> GenerationOutput:
        """The rollouts, on the rank that recorded them."""
        return replace(self._drawn.output(prompts, self.device), preemptions=self.scheduler.preemptions)

    def _tokens(self) -> Tensor:
        """The step's input [rows] int64: the last token of the decodes, all tokens of the prefills."""
        count, known = len(self.step.decodes), self.choice.tokens
        parts = [known[self._sequences[:count], self._lengths[:count] - 1]]
        parts += [known[prefill.members[0].index, : prefill.length] for prefill in self.step.prefills]
        return torch.from_numpy(np.concatenate(parts)).to(self.device)

    def _decode_table(self) -> np.ndarray:
        """The pages of the decodes [decodes, pages] int32, as many columns as the longest of them has pages."""
        slots, page = [s.slot for s in self.step.decodes], self.cache.kernels.page
        longest = int(self._lengths[: len(slots)].max()) - 1
        return self._table[slots, : pages_for(longest, page)]

    def _head_rows(self) -> Tensor | None:
        """Which rows of the last stage's output the drawing sequences continue; None: row i for sequence i."""
        if not self.step.prefills:
            return None
        rows, end = list(range(len(self.step.decodes))), len(self.step.decodes)
        for prefill in self.step.prefills:
            end += prefill.length
            rows += [end - 1] * len(prefill.members)
        return torch.tensor(rows, device=self.device)


def _places(sequence: RunningSequence, length: int, page: int) -> np.ndarray:
    """[length] int64: where the tokens of a sequence are kept."""
    starts = np.array(sequence.pages, dtype=np.int64) * page
    return (starts[:, None] + np.arange(page)).reshape(-1)[:length]
