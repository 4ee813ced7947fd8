"""Which token comes next for every sequence of a batch, and which responses end with it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from realhf.engine.batch import Batch
from realhf.engine.generate.sampling import Draw, Truncation, draw, replay, uniform
from realhf.engine.interface import GenerationOutput, GenerationRequest
from realhf.engine.returned import check_end
from realhf.parallel.ordered import on_gpu
from realhf.parallel.vocabulary import logprobs_in_order

# Stands for a token where there is none, because the logits are no distribution: all ranks get it, and say so alike.
_NO_TOKEN = -1

_UNIFORMS_AT_ONCE = 64  # positions of a response whose random numbers are made together


class TokenChoice:
    """The tokens of all sequences of a batch: given ones (prompts), drawn ones, and where responses end.

    Tokens lie on the host, one row a sequence, because ends are looked for there.

    `device` is that of the logits. `leaves`: of a model whose log-probabilities must have the bits of those in training
    (`realhf.geometry.reproducible`); 0: of another one.
    """

    def __init__(self, batch: Batch, request: GenerationRequest, device: torch.device, leaves: int = 0):
        prompts, forced, limits = batch.data[request.prompt_key], request.forced, request.limits
        self.options, self.sample_key, self._is_end = request.options, request.sample_key, request.is_end
        self.device, self.leaves = device, leaves
        self.ids = torch.tensor(batch.ids)
        self.is_forced = forced is not None
        self.prompt_lengths = np.array([len(p) for p in prompts])
        if forced is not None:
            limits = [len(response) for response in forced]
        self.limits = np.array([self.options.max_new_tokens] * len(prompts) if limits is None else limits)
        width = int((self.prompt_lengths + self.limits).max())
        self.tokens = np.zeros((len(prompts), width), dtype=np.int64)
        for row, prompt in zip(self.tokens, prompts, strict=True):
            row[: len(prompt)] = prompt.cpu().numpy()
        if forced is not None:
            for row, start, response in zip(self.tokens, self.prompt_lengths, forced, strict=True):
                row[start : start + len(response)] = response.cpu().numpy()
        self._stops = [np.array(stop) for stop in self.options.stop_sequences]
        self._uniforms: dict[int, np.ndarray] = {}

    def longest(self) -> np.ndarray:
        """[sequences]: tokens whose keys and values may be needed; those of the last token never are."""
        return self.prompt_lengths + self.limits - 1

    def first_with_prompt(self) -> list[int]:
        """For every sequence the first one with the same prompt."""
        first: dict[bytes, int] = {}
        prompts = (row[:length].tobytes() for row, length in zip(self.tokens, self.prompt_lengths, strict=True))
        return [first.setdefault(prompt, i) for i, prompt in enumerate(prompts)]

    def draw(self, logits: Tensor, sequences: np.ndarray, lengths: np.ndarray) -> Draw:
        """The next token of `sequences` [n], which have `lengths` [n] tokens, from logits [n, vocab]."""
        drawn = self._draw(logits, sequences, lengths)
        if self.leaves:
            is_nan, temperature = drawn.logprobs.isnan(), self.options.temperature or 1.0
            untruncated = logprobs_in_order(logits, drawn.tokens, temperature, self.leaves).masked_fill(
                is_nan, torch.nan
            )
            is_whole = self.options.temperature == 0 or drawn.logprobs is drawn.untruncated
            drawn = replace(drawn, logprobs=untruncated if is_whole else drawn.logprobs, untruncated=untruncated)
        return replace(drawn, tokens=drawn.tokens.masked_fill(drawn.logprobs.isnan(), _NO_TOKEN))

    def _draw(self, logits: Tensor, sequences: np.ndarray, lengths: np.ndarray) -> Draw:
        options = self.options
        given = lengths - self.prompt_lengths[sequences]  # [n], tokens of the response so far
        forbidden = None
        if options.end_token >= 0 and (given < options.min_new_tokens).any():
            tokens = np.where(given < options.min_new_tokens, options.end_token, -1)
            forbidden = torch.from_numpy(tokens).to(self.device)
        in_order = self.leaves > 0 and on_gpu(logits)
        truncation = Truncation(top_k=options.top_k, top_p=options.top_p, forbidden=forbidden, in_order=in_order)
        if self.is_forced:
            given_tokens = torch.from_numpy(self.tokens[sequences, lengths]).to(self.device)
            return replay(logits, given_tokens, options.temperature, truncation)
        uniforms = None
        if options.temperature > 0:
            uniforms = torch.from_numpy(self._random_numbers(sequences, given)).to(self.device)
        return draw(logits, uniforms, options.temperature, truncation)

    def accept(self, drawn: np.ndarray, sequences: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Appends `drawn` [n] to `sequences`, which have `lengths` tokens; [n] bool: the response ends with it.

        Raises:
            FloatingPointError: naming sample and token, a sequence has none, as its logits are no distribution.
        """
        self._check(drawn, sequences, lengths)
        self.tokens[sequences, lengths] = drawn
        given = lengths + 1 - self.prompt_lengths[sequences]
        is_end = given >= self.limits[sequences]
        if self.is_forced:
            return is_end
        may_end = given >= self.options.min_new_tokens
        is_end |= may_end & (drawn == self.options.end_token)
        for stop in self._stops:
            places = lengths[:, None] + 1 - len(stop) + np.arange(len(stop))  # [n, stop]
            is_whole = given >= len(stop)  # a stop sequence lies within the response
            is_end |= may_end & is_whole & (self.tokens[sequences[:, None], places.clip(0)] == stop).all(1)
        if self._is_end is not None:
            for i in np.flatnonzero(may_end & ~is_end):
                start, length = self.prompt_lengths[sequences[i]], lengths[i] + 1
                is_end[i] = check_end(self._is_end(self.tokens[sequences[i], start:length]))
        return is_end

    def _check(self, drawn: np.ndarray, sequences: np.ndarray, lengths: np.ndarray) -> None:
        for i in np.flatnonzero(drawn == _NO_TOKEN)[:1]:
            sequence = sequences[i]
            given = lengths[i] - self.prompt_lengths[sequence]
            raise FloatingPointError(
                f"generate in step {self.sample_key[1] + 1}: the logits of sample {int(self.ids[sequence])} for token "
                f"{given} of its response are NaN or infinite, so that no token can be drawn from them; start "
                "from weights that are finite, and lower the learning rate if training made them so"
            )

    def _random_numbers(self, sequences: np.ndarray, given: np.ndarray) -> np.ndarray:
        """[n] float64. They are made for many positions at once: for one it takes as long."""
        numbers = np.empty(len(given))
        for block in np.unique(given // _UNIFORMS_AT_ONCE).tolist():
            if block not in self._uniforms:
                offsets = torch.arange(_UNIFORMS_AT_ONCE) + block * _UNIFORMS_AT_ONCE
                positions = torch.from_numpy(self.prompt_lengths)[:, None] + offsets
                self._uniforms[block] = uniform(*self.sample_key, self.ids[:, None], positions).numpy()
            is_here = given // _UNIFORMS_AT_ONCE == block
            numbers[is_here] = self._uniforms[block][sequences[is_here], given[is_here] % _UNIFORMS_AT_ONCE]
        return numbers


@dataclass
class DrawnTokens:
    """The draws of all steps of a batch."""

    draws: list[tuple[np.ndarray, Draw]] = field(default_factory=list)  # with the sequences that they continue
    logits: list[Tensor] = field(default_factory=list)

    def add(self, sequences: np.ndarray, drawn: Draw, logits: Tensor | None) -> None:
        """Takes a step's draw for `sequences` [n]; with `logits` [n, vocab] where they are asked for."""
        self.draws.append((sequences, drawn))
        if logits is not None:
            self.logits.append(logits)

    def output(self, prompts: Sequence[Tensor], device: torch.device) -> GenerationOutput:
        """The rollouts of all sequences, in order."""
        sequences = torch.from_numpy(np.concatenate([s for s, _ in self.draws]))
        order = sequences.argsort(stable=True).to(device)  # by sequence, and by step within one
        counts = sequences.bincount().tolist()  # each has one at least

        def by_sequence(parts: list[Tensor]) -> list[Tensor]:
            return list(torch.cat(parts)[order].split(counts)) if parts else []

        draws = [d for _, d in self.draws]
        responses = by_sequence([d.tokens for d in draws])
        return GenerationOutput(
            sequences=[torch.cat([p.to(r.device), r]) for p, r in zip(prompts, responses, strict=True)],
            logprobs=by_sequence([d.logprobs for d in draws]),
            untruncated_logprobs=by_sequence([d.untruncated for d in draws]),
            margins=by_sequence([d.margins for d in draws]),
            logits=by_sequence(self.logits),
        )
