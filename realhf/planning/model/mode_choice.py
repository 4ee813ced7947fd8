"""Modes of operators for a training whose states do not fit as ZeRO-1 has them: some operators, or slices of them, are
sharded over dp, those that cost the least time (OSDP, IJCAI 2023). The choice is exact (csrc/search/osdp.h)."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby

from realhf.architecture.compute import ModeRules, modes_text
from realhf.architecture.model import DecoderConfig
from realhf.base.kept import kept
from realhf.geometry.layout import ParallelStrategy
from realhf.geometry.operators import EMBEDDING, NORMS, can_be_cut, cut_dim, kind_of, operators
from realhf.planning import _search
from realhf.planning.model.osdp.exchange import Exchange
from realhf.planning.model.osdp.units import (
    SMALLEST_SLICED_BYTES,
    Modes,
    Shapes,
    by_stage,
    operators_on,
    slice_elements,
    vector_elements,
)
from realhf.planning.model.rank_work import HOLES, RankWork
from realhf.planning.model.sizes import model_sizes

SLICES = (1, 2, 4, 8)  # of a large operator, to choose from: more take longer, and less memory while they are gathered
# Parts of the memory that sharding all states would save, where other calls share the devices.
SAVED_PARTS = (0.25, 0.5, 0.75)
_ZERO1: Modes = ("zero1",)
_SHARDED: Modes = ("sharded",)


def memory_limits(left_bytes: float, zero1_bytes: int, least_bytes: int, *, shares_devices: bool) -> list[int]:
    """Bytes that states may take, with what is gathered of them: choices of their own, the largest first.

    A call that is alone (supervised training) gets what its activations leave (`left_bytes`), since sharding more only
    costs time. Where other calls share the devices, what they need is not known before a plan is chosen: some of what
    sharding can save, between `zero1_bytes` and `least_bytes` with all states divided, is a choice of its own.
    """
    if not shares_devices:
        return [int(left_bytes)]
    saved = [round(part * (zero1_bytes - least_bytes)) for part in SAVED_PARTS]
    levels = [min(left_bytes, zero1_bytes - part) for part in saved]
    return list(dict.fromkeys(int(level) for level in levels))


@dataclass(frozen=True)
class _Alike:
    """Operators of one kind with tensors of the same shapes, by name in the order of their layers; all of them in
    layers that are recomputed, or none."""

    kind: str
    names: tuple[str, ...]
    shapes: Shapes
    can_be_cut: bool
    is_recomputed: bool


@dataclass(frozen=True)
class _Slice:
    """Of one of several equal slices: seconds in a mini-batch and bytes in both modes, and the bytes of its use."""

    zero1: tuple[float, int]
    sharded: tuple[float, int]
    gather_bytes: int


_Cut = tuple[int, int, tuple[tuple[float, int, bool], ...]]
_Row = tuple[_Cut, ...]  # as `_search.solve_osdp` takes an operator
_Sharded = tuple[int, int]  # of a row: which cut it has, and how many slices are sharded


class Chooser:
    """Chooses modes of the operators of a training. `work`: of the training as ZeRO-1 has it, with the `exchanges` of
    the stages of its pipeline."""

    def __init__(self, work: RankWork, exchanges: tuple[Exchange, ...]):
        self._work, self._exchanges = work, exchanges
        placed = work.placed
        self._model, self._strategy, self._features = placed.model, placed.strategy, placed.features
        self._item, self._gradient = placed.item, placed.features.gradient_bytes(placed.dtype)
        self._state = 0 if self._features.offloads_states else placed.features.state_bytes(placed.dtype)

    def rules(self, limit_bytes: int | None) -> ModeRules | None:
        """The modes that take the least time with states, and what is gathered of them, in `limit_bytes` (None: those
        that need the least memory); None where none are so small.

        Stages with the same tied embedding have it in one mode, which the fuller of them chooses.
        """
        last = self._strategy.pp - 1
        sizes, tp, pp = model_sizes(self._model), self._strategy.tp, self._strategy.pp
        ends = sorted({0, last}, key=lambda stage: -sizes.on_stage(tp, pp, stage))
        found: dict[str, Modes] = {}
        for stage in [*ends, *range(1, last)]:
            modes = self._on_stage(stage, limit_bytes, found.get(EMBEDDING) if stage in ends[1:] else None)
            if modes is None:
                return None
            found |= modes
        return compact(found, self._model)

    def _on_stage(self, stage: int, limit_bytes: int | None, of_embedding: Modes | None) -> dict[str, Modes] | None:
        """By operator of a stage. The tied embedding has the modes of the other stage that has it."""
        groups = self._groups(stage)
        rows = tuple(chain.from_iterable(self._rows(group, stage, of_embedding) for group in groups))
        if limit_bytes is None:
            limit = _search.solve_osdp(rows, 0)["smallest_fixed_bytes"]
        else:
            limit = limit_bytes - self._fixed_bytes(stage)
        solved = _solved(rows, limit)
        return None if solved is None else self._modes(groups, solved[1])

    def _rows(self, group: _Alike, stage: int, of_embedding: Modes | None) -> Iterator[_Row]:
        """The rows of the solver, each of some operators that are alike; each row is cut as suits it best."""
        numbers, fixed = self._numbers(group), of_embedding if group.kind == EMBEDDING else None
        for operators_here in _in_rows(group, numbers[-1]):
            yield tuple(_cut(operators_here * number, self._slice(group, number, stage), fixed) for number in numbers)

    def _groups(self, stage: int) -> "tuple[_Alike, ...]":
        return _alike(self._model, self._strategy, stage, self._exchanges[stage].recomputes)

    def _numbers(self, group: _Alike) -> list[int]:
        """The numbers of slices that an operator can have."""
        is_large = sum(math.prod(shape) for shape in group.shapes) * self._item >= SMALLEST_SLICED_BYTES
        most = group.shapes[0][cut_dim(group.kind)] if group.can_be_cut and is_large else 1
        return [number for number in SLICES if number <= most]

    @kept
    def _slice(self, group: _Alike, number: int, stage: int) -> _Slice:
        """Seconds and bytes of a slice."""
        exchange, dp = self._exchanges[stage], self._strategy.dp
        whole = max(slice_elements(group.shapes, _ZERO1, dp, cut_dim(group.kind)))
        plain = max(slice_elements(group.shapes, _ZERO1 * number, dp, cut_dim(group.kind)))
        sharded = max(slice_elements(group.shapes, _SHARDED * number, dp, cut_dim(group.kind)))
        kept = self._item + self._gradient
        held = 2 if self._features.prefetch else 1
        gather = sharded * (held * self._item + 2 * self._gradient)
        return _Slice(
            # A part of one vector, however the operator is cut.
            zero1=(exchange.zero1_s(whole) / number, math.ceil(plain * kept + plain * self._state / dp)),
            sharded=(
                exchange.sharded_s(sharded, group.kind, 1 / number, recomputed=group.is_recomputed),
                sharded // dp * (kept + self._state),
            ),
            gather_bytes=math.ceil(gather * (1 + HOLES if self._features.in_host_memory else 1)),
        )

    def _fixed_bytes(self, stage: int) -> int:
        """The part that no choice changes: norms, their padding, and copies for checkpoints."""
        dp, placed = self._strategy.dp, self._work.placed
        norms = operators_on(self._model, self._strategy, stage).get(NORMS, ())
        elements = vector_elements(sum(slice_elements(norms, _ZERO1, dp, cut_dim(NORMS))), dp) + vector_elements(1, dp)
        written = placed.elements(is_divided=True) if self._features.copies_checkpoints else 0
        state = placed.features.state_bytes(placed.dtype)
        return math.ceil(elements * (self._item + self._gradient + self._state / dp)) + written * (self._item + state)

    def _modes(self, groups: Sequence[_Alike], sharded: Sequence[_Sharded]) -> dict[str, Modes]:
        """By operator, from what the solver says of its rows. Operators that are alike change places: the first layers
        are sharded, those in fewer slices first."""
        modes: dict[str, Modes] = {}
        left = iter(sharded)
        for group in groups:
            counts: Counter[int] = Counter()
            numbers = self._numbers(group)
            for _ in _in_rows(group, numbers[-1]):
                cut, count = next(left)
                counts[numbers[cut]] += count
            found: list[Modes] = []
            for number, count in sorted(counts.items()):
                whole, rest = divmod(count, number)
                found += [_SHARDED * number] * whole + [_SHARDED * rest + _ZERO1 * (number - rest)] * (rest > 0)
            found += [_ZERO1] * (len(group.names) - len(found))
            modes |= zip(group.names, found, strict=True)
        return modes


@lru_cache(maxsize=1024)
def _alike(
    model: DecoderConfig, strategy: ParallelStrategy, stage: int, recomputed: frozenset[int]
) -> tuple[_Alike, ...]:
    """The operators of a stage that can be sharded; `recomputed`: the layers whose operators are gathered once more."""
    names: dict[tuple[str, Shapes, bool, bool], list[str]] = {}
    for name, shapes in operators_on(model, strategy, stage).items():
        if name != NORMS:
            again = name.startswith("layers.") and int(name.split(".")[1]) in recomputed
            names.setdefault((kind_of(name), shapes, can_be_cut(name, model), again), []).append(name)
    return tuple(_Alike(kind, tuple(each), shapes, *alike) for (kind, shapes, *alike), each in names.items())


def _in_rows(group: _Alike, most: int) -> Iterator[int]:
    """How many operators of a group each of its rows has, in up to `most` slices each. The first is alone: it may be
    cut finer than the others, to be sharded in part."""
    left = len(group.names) - 1
    yield 1
    while left > 0:
        here = min(_search.MOST_SLICES // most, left)
        yield here
        left -= here


def _cut(slices: int, part: _Slice, fixed: Modes | None) -> _Cut:
    """With both modes, or the one that is fixed."""
    modes: tuple[tuple[float, int, bool], ...] = ((*part.zero1, False), (*part.sharded, True))
    if fixed:
        modes = modes[1:] if fixed == _SHARDED else modes[:1]
    return slices, part.gather_bytes, modes


@lru_cache(maxsize=65536)
def _solved(rows: tuple[_Row, ...], memory_bytes: int) -> tuple[float, tuple[_Sharded, ...]] | None:
    """Seconds of the best choice within memory, and what it has sharded. None: nothing fits."""
    if memory_bytes < 0:
        return None
    found = _search.solve_osdp(rows, memory_bytes)
    if not found["feasible"]:
        return None
    sharded = (
        (cut, sum(count for count, (_, _, gathers) in zip(counts, cuts[cut][2], strict=True) if gathers))
        for cut, counts, cuts in zip(found["cuts"], found["slices"], rows, strict=True)
    )
    return found["step_s"], tuple(sharded)


def compact(modes: Mapping[str, Modes], model: DecoderConfig) -> ModeRules:
    """Few and plain rules that give operators these modes, and leave all that is not named to ZeRO-1."""
    texts = {name: modes_text(each) for name, each in modes.items() if each != _ZERO1}
    known = [name for name in operators(model) if name != NORMS]
    if texts and set(texts) == set(known) and len(set(texts.values())) == 1:
        return (("*", texts[known[0]]),)
    kinds = {kind_of(name): None for name in known if name.startswith("layers.")}
    runs: dict[tuple[str, str], list[str]] = {}  # of layers in one mode: the kinds that have it
    for kind in kinds:
        for layers, text in _runs({n: texts.get(f"layers.{n}.{kind}") for n in range(model.num_layers)}):
            runs.setdefault((layers, text), []).append(kind)
    found = [(name, text) for name, text in texts.items() if not name.startswith("layers.")]
    for (layers, text), having in runs.items():
        found += [(f"layers.{layers}.{kind}", text) for kind in (["*"] if len(having) == len(kinds) else having)]
    return tuple(found)


def _runs(texts: Mapping[int, str | None]) -> Iterator[tuple[str, str]]:
    """Layers that follow one another in one mode, as rules name them."""
    for text, run in groupby(texts.items(), key=lambda entry: entry[1]):
        layers = [layer for layer, _ in run]
        if text is not None:
            first, last = layers[0], layers[-1]
            is_one, is_all = first == last, len(layers) == len(texts)
            yield "*" if is_all and not is_one else str(first) if is_one else f"{first}-{last}", text


def sharded_text(rules: ModeRules, model: DecoderConfig, strategy: ParallelStrategy) -> str:
    """For people: the rules, and how much of the model they shard."""
    stages = by_stage(model, strategy, rules)
    sharded = sum(stage.sharded for stage in stages)
    whole = sum(stage.replicated + stage.zero1 for stage in stages) + sharded
    named = ", ".join(f"{pattern} {modes}" for pattern, modes in rules)
    return f"{named}; the other operators zero1; {sharded / whole:.0%} of the parameters sharded over dp={strategy.dp}"
