"""The work of a rank in numbers: parts, prompts and rows; turns and phases of decoding; bytes while a call runs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from msgspec import structs

from realhf.architecture.chunks import PREFILL_TOKENS, RING_BYTES
from realhf.architecture.compute import Recomputed
from realhf.architecture.model import DecoderConfig
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, ModelInterfaceType
from realhf.dataflow.interface import InterfaceConfig
from realhf.geometry.layout import ParallelStrategy, chunk_layers
from realhf.geometry.pipeline_schedule import training_order
from realhf.planning.model import rank_work
from realhf.planning.model.activations import InFlight, activation_elements, beyond_kept_bytes, kept_bytes
from realhf.planning.model.features import ENGINE
from realhf.planning.model.lengths import DecodePhase, LengthDistribution
from realhf.planning.model.rank_work import RankWork, layers_in_flight
from realhf.planning.model.sizes import largest_units
from realhf.planning.model.turns import Waiting, spread, take_turns
from realhf.planning.model.workload import Workload
from tests.unit.planning.graphs import TINY, call, work_of

LENGTHS = Workload(prompt_tokens=8, new_tokens=5)
LAYER = 41088  # elements of TINY's
ENDS = 32 * 64  # of its embedding, and of its head beside the norm's 64


def work(
    kind: ModelInterfaceType,
    strategy: tuple[int, ...] = (1, 1, 1),
    micro_batches: int = 1,
    lengths: Workload = LENGTHS,
    *,
    model: DecoderConfig = TINY,
    dtype: Any = "float32",
    **features: Any,
) -> RankWork:
    """Of 16 samples."""
    definition, placed = call("m", model, kind, "x"), ParallelStrategy(*strategy)
    return work_of(definition, placed, micro_batches, lengths, dtype, replace(ENGINE, **features))


@pytest.mark.parametrize(
    ("kind", "strategy", "micro_batches", "parts", "in_flight"),
    [
        (INFERENCE, (1, 1, 4), 2, 2, 2),
        (INFERENCE, (1, 1, 2), 4, 4, 2),
        (TRAIN_STEP, (1, 1, 4), 2, 2, 2),
        (GENERATE, (1, 1, 4), 2, 4, 4),  # one for every stage at least
        (GENERATE, (1, 1, 2), 4, 4, 2),
        (GENERATE, (8, 1, 4), 1, 2, 2),  # and none empty: a rank has two samples
        (GENERATE, (8, 1, 1), 4, 2, 1),
    ],
)
def test_parts(
    kind: ModelInterfaceType, strategy: tuple[int, ...], micro_batches: int, parts: int, in_flight: int
) -> None:
    found = work(kind, strategy, micro_batches)
    assert (found.parts, found.parts_in_flight) == (parts, in_flight)


@pytest.mark.parametrize(
    ("samples_per_prompt", "dp", "micro_batches", "sharing"),
    [
        (1, 1, 1, 1),
        (4, 1, 1, 4),
        (4, 1, 8, 2),  # a part has two samples
        (4, 8, 1, 2),  # a rank has two
        (16, 2, 1, 8),
        (6, 1, 1, 2),  # groups of 6 are cut where ranks are
        (4, 8, 3, 1),  # less than one sample a part
    ],
)
def test_samples_of_a_part_that_share_a_prompt(
    samples_per_prompt: int, dp: int, micro_batches: int, sharing: int
) -> None:
    lengths = replace(LENGTHS, samples_per_prompt=samples_per_prompt)
    found = work(INFERENCE, (dp, 1, 1), micro_batches, lengths)
    assert found.sharing == sharing
    assert found.prompts == 16 / dp / micro_batches / sharing


@pytest.mark.parametrize(
    ("changes", "features", "model", "shared"),
    [
        ({}, {"in_host_memory": True}, TINY, True),
        ({}, {}, TINY, False),
        ({"prompt_tokens": 7, "new_tokens": 6}, {"in_host_memory": True}, TINY, False),
        ({"prompt_tokens": 13, "new_tokens": 0}, {"in_host_memory": True}, TINY, False),
        ({}, {"in_host_memory": True}, replace(TINY, sliding_window=4), False),
    ],
)
def test_rows(changes: dict[str, int], features: dict[str, bool], model: DecoderConfig, shared: bool) -> None:
    """13 tokens of 8 samples; two of four parts' four share a prompt of 8, so that half of these are computed."""
    lengths = Workload(**{"prompt_tokens": 8, "new_tokens": 5, "samples_per_prompt": 2} | changes)
    found = work(TRAIN_STEP, (1, 1, 1), 2, lengths, model=model, **features)
    assert found.rows == 8 * (13 - (4 if shared else 0))


def test_rows_at_the_longest() -> None:
    """Eight samples with prompts of up to 100 tokens, four to each, and up to 7 new ones. Prompts below 8 tokens are
    not shared: they have as many rows as one of 28 that is."""
    lengths = Workload(prompt_tokens=50, new_tokens=5, max_prompt_tokens=100, max_new_tokens=7, samples_per_prompt=4)
    assert work(TRAIN_STEP, (1, 1, 1), 2, lengths, in_host_memory=True).most_rows == 8 * (25 + 7)
    short = replace(lengths, prompt_tokens=10, max_prompt_tokens=20)
    assert work(TRAIN_STEP, (1, 1, 1), 2, short, in_host_memory=True).most_rows == 8 * (7 + 7)
    assert work(TRAIN_STEP, (1, 1, 1), 2, lengths).most_rows == 8 * 107


def test_samples_that_are_expected_to_be_computed() -> None:
    """Of 16 samples, two to a prompt, 6 are expected to be trained on: 3 in each of two parts, which have 4 at most. Of
    eight parts each has a prompt's two."""
    lengths = replace(LENGTHS, samples_per_prompt=2)
    each = [structs.replace(work(TRAIN_STEP, (1, 1, 1), parts, lengths), expected=6) for parts in (2, 8)]
    assert [found.computed for found in each] == [6, 16]
    assert [found.rows for found in each] == [3 * 13, 2 * 13]
    assert [found.most_rows for found in each] == [4 * 13, 2 * 13]
    assert structs.replace(work(TRAIN_STEP, (1, 1, 1), 1, lengths), expected=99).computed == 16
    assert work(TRAIN_STEP, (1, 1, 1), 2, lengths).computed == 16


@pytest.mark.parametrize(
    ("given", "strategy", "room"),
    [
        (None, (1, 1, 1), 256),
        (256, (1, 1, 1), 256),  # a page of 16 tokens for each of 16 samples
        (1000, (1, 1, 1), 256),
        (255, (1, 1, 1), 240),
        (40, (1, 1, 1), 32),
        (15, (1, 1, 1), 16),  # a page at least
        (100, (1, 1, 2), 96),  # three pages for each of two parts
        (95, (1, 1, 2), 64),
    ],
)
def test_room_for_keys_and_values(given: int | None, strategy: tuple[int, ...], room: float) -> None:
    found = work(GENERATE, strategy, 1, replace(LENGTHS, kv_cache_tokens=given))
    assert (found.room_tokens, found.waits) == (room, room < 256)
    assert (found.turns is not None) == found.waits


def test_each_part_in_flight_takes_turns_in_its_share_of_the_room() -> None:
    """Four micro-batches on two stages: of the eight samples of each part four run at once, in two pages."""
    found = work(GENERATE, (1, 1, 2), 4, drawn(kv_cache_tokens=64))
    turns = take_turns(
        Waiting(
            room=32, sequences=8, running=4, sharing=1, prompt_tokens=8, responses=DRAWN, longest=6, least_share=0.0
        )
    )
    assert found.turns == turns
    assert found.preemptions == 2 * turns.preemptions
    assert found.decode_phases == tuple(replace(each, steps=each.steps / 2) for each in turns.phases)


@pytest.mark.parametrize(("on_gpus", "least_share"), [(True, 1 / 16), (False, 0.0)])
def test_without_a_distribution_responses_spread_around_their_mean(
    on_gpus: bool, least_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(rank_work, "take_turns", asked.append)
    lengths = Workload(prompt_tokens=8, new_tokens=4, max_new_tokens=10, kv_cache_tokens=64)
    assert work(GENERATE, lengths=lengths, on_gpus=on_gpus).turns is None
    assert asked == [
        Waiting(
            room=64, sequences=16, running=16, sharing=1, prompt_tokens=8, responses=spread(4, 10), longest=10,
            least_share=least_share,
        )
    ]  # fmt: skip
    assert work(GENERATE, lengths=replace(lengths, kv_cache_tokens=None)).preemptions == 0.0


@pytest.mark.parametrize(
    ("new_tokens", "phase"),
    [(5, DecodePhase(4.0, 1.0, 2.5)), (1, DecodePhase(0.0, 1.0, 0.5)), (0, DecodePhase(0.0, 1.0, 0.0))],
)
def test_responses_that_are_alike_decode_up_to_the_limit(new_tokens: int, phase: DecodePhase) -> None:
    lengths = Workload(prompt_tokens=8, new_tokens=new_tokens)
    assert work(GENERATE, (1, 1, 1), 1, lengths).decode_phases == (phase,)


def test_as_many_sequences_decode_as_the_mean_response_says() -> None:
    """Nine steps up to ten tokens, and of each response of four on average three of them."""
    lengths = Workload(prompt_tokens=8, new_tokens=4, max_new_tokens=10)
    assert work(GENERATE, (1, 1, 1), 1, lengths).decode_phases == (DecodePhase(9.0, 1 / 3, 5.0),)


DRAWN = LengthDistribution((2, 6), (0.5, 0.5))  # mean 4, mean square 20
# Of a token drawn from all but the first: 2 x 1 / 2 / 3 ... (20 - 4) / (2 x 3).
MIDDLE = 16 / 6


def drawn(**changes: Any) -> Workload:
    return Workload(prompt_tokens=8, new_tokens=4, max_new_tokens=6, responses=DRAWN, **changes)


def test_phases_of_responses_that_all_run_at_once() -> None:
    assert work(GENERATE, (2, 1, 1), 1, drawn()).decode_phases == DRAWN.decode_phases(16)


def test_responses_of_one_token_take_no_places_of_others() -> None:
    one = LengthDistribution((1,), (1.0,))
    lengths = Workload(prompt_tokens=8, new_tokens=1, responses=one)
    assert work(GENERATE, (1, 1, 1), 4, lengths).decode_phases == one.decode_phases(4)


@pytest.mark.parametrize(
    ("strategy", "micro_batches", "at_once", "rounds"),
    [
        ((1, 1, 1), 4, 4, 4),  # four parts one after another
        ((2, 1, 1), 4, 4, 4),  # two of each of two ranks
        ((1, 1, 2), 4, 8, 2),
    ],
)
def test_a_batch_stays_full_while_sequences_wait(
    strategy: tuple[int, ...], micro_batches: int, at_once: int, rounds: int
) -> None:
    """Those that wait take the places of those that end: steps of all tokens, and then the last of them shrink."""
    found = work(GENERATE, strategy, micro_batches, drawn()).decode_phases
    shrinking = [replace(each, steps=each.steps / rounds) for each in DRAWN.decode_phases(at_once)]
    full = DecodePhase((rounds - 1) / rounds * 3, 1.0, MIDDLE)
    assert found == (full, *shrinking)


def pages(prompt: int, new_tokens: int, sharing: int) -> int:
    """Of a group: the prompt's full pages once, what lies behind them for each."""
    full = prompt // 16
    return full + sharing * (-(-(prompt + new_tokens) // 16) - full)


@pytest.mark.parametrize("longest", [1, 14, 15, 16, 17, 20, 31, 32, 47])
@pytest.mark.parametrize("new_tokens", [1, 12, 16, 30])
@pytest.mark.parametrize("are_alike", [False, True])
@pytest.mark.parametrize(("samples_per_prompt", "micro_batches"), [(1, 1), (4, 1), (4, 2)])
def test_pages_that_suffice_for_every_prompt(
    longest: int, new_tokens: int, are_alike: bool, samples_per_prompt: int, micro_batches: int
) -> None:
    """The most that a group needs with any prompt that there may be; parts that wait share no pages."""
    lengths = Workload(
        prompt_tokens=longest if are_alike else max(longest / 2, 0.5), max_prompt_tokens=longest,
        new_tokens=new_tokens, samples_per_prompt=samples_per_prompt,
    )  # fmt: skip
    sharing = samples_per_prompt if micro_batches == 1 else 1
    of_group = max(pages(prompt, new_tokens, sharing) for prompt in ([longest] if are_alike else range(1, longest + 1)))
    found = work(GENERATE, (1, 1, 1), micro_batches, lengths).needed_tokens
    assert found == 16 / micro_batches / sharing * of_group * 16


def test_parts_of_unequal_size_have_room_for_the_larger() -> None:
    """16 samples in three parts, all in flight: of 6 each at most, with a page for each."""
    assert work(GENERATE, (1, 1, 3), 3).needed_tokens == 3 * 6 * 16


@dataclass(frozen=True, kw_only=True)
class WithoutModel(InterfaceConfig):
    implementation: ClassVar[str] = "nowhere:Nothing"
    uses_model: ClassVar[bool] = False


def test_a_call_that_does_not_use_its_model_takes_no_memory() -> None:
    definition = replace(call("m", TINY, GENERATE, "x"), interface_impl=WithoutModel())
    lengths = replace(LENGTHS, decode_graphs="kept")
    found = work_of(definition, ParallelStrategy(), 1, lengths, features=replace(ENGINE, on_gpus=True))
    assert found.dynamic_bytes() == 0.0
    assert found.kept_cache_bytes() == 0.0


A_TOKEN = 2 * 64 * 4  # of one layer's cache


@pytest.mark.parametrize(
    ("kind", "graphs", "changes", "kept"),
    [
        (GENERATE, "kept", {}, 4 * A_TOKEN * (16 * 16 + 16)),  # and a page for what pads a graph
        (GENERATE, "call", {}, 0),
        (GENERATE, "kept", {"on_gpus": False}, 0),
        (INFERENCE, "kept", {}, 0),
        (GENERATE, "kept", {"fully_sharded": True}, 0),
    ],
)
def test_a_cache_that_graphs_keep(kind: ModelInterfaceType, graphs: Any, changes: dict[str, bool], kept: float) -> None:
    features = {"on_gpus": True} | changes
    assert work(kind, lengths=replace(LENGTHS, decode_graphs=graphs), **features).kept_cache_bytes() == kept


def test_a_cache_of_given_room_has_a_spare_page_for_each_part() -> None:
    lengths = replace(LENGTHS, decode_graphs="kept", kv_cache_tokens=64)
    assert work(GENERATE, (1, 1, 1), 1, lengths, on_gpus=True).kept_cache_bytes() == 4 * A_TOKEN * (64 + 16)
    assert work(GENERATE, (1, 1, 2), 1, lengths, on_gpus=True).kept_cache_bytes() == 2 * A_TOKEN * (64 + 2 * 16)


SHARDED = (("*", "sharded"),)
FIRST, SECOND = largest_units(TINY, 1)


@pytest.mark.parametrize(
    ("kind", "features", "gathered"),
    [
        (INFERENCE, {}, 0),
        (GENERATE, {"fully_sharded": True}, 4 * (4 * LAYER + 2 * ENDS + 64)),
        (INFERENCE, {"fully_sharded": True}, 4 * 2 * LAYER),
        (INFERENCE, {"fully_sharded": True, "prefetch": False}, 4 * LAYER),
        # Gradients of one unit twice.
        (TRAIN_STEP, {"fully_sharded": True}, 4 * 2 * LAYER + 2 * 4 * LAYER),
        (TRAIN_STEP, {"fully_sharded": True, "prefetch": False}, 4 * LAYER + 2 * 4 * LAYER),
        # Operators of their own: gate, up and down have 64 x 128 each.
        (GENERATE, {"modes": SHARDED}, 4 * (4 * 40960 + 2 * ENDS)),
        (INFERENCE, {"modes": SHARDED, "prefetch": False}, 4 * 8192),
        (INFERENCE, {"modes": SHARDED}, 4 * 2 * 8192),
        (TRAIN_STEP, {"modes": SHARDED, "prefetch": False}, 4 * 8192 + 2 * 4 * 8192),
        (TRAIN_STEP, {"modes": SHARDED}, 4 * 2 * 8192 + 2 * 4 * 8192),
        (TRAIN_STEP, {"modes": (("*", "zero1"),)}, 0),
    ],
)
def test_gathered_bytes(kind: ModelInterfaceType, features: dict[str, Any], gathered: int) -> None:
    assert (FIRST, SECOND) == (LAYER, LAYER)
    assert work(kind, (2, 1, 1), **features).gathered_bytes() == gathered
    assert work(kind, (1, 2, 1), **features).gathered_bytes() == 0, "nothing is divided over one rank"


def test_a_tied_embedding_is_gathered_with_another_unit() -> None:
    tied = replace(TINY, tied_embeddings=True)
    assert work(INFERENCE, (2, 1, 1), model=tied, fully_sharded=True, prefetch=False).gathered_bytes() == 8 * LAYER


def test_the_stage_that_gathers_most_counts() -> None:
    """The last one, with a head of 4096 x 64."""
    wide = replace(TINY, vocab_size=4096)
    found = work(INFERENCE, (2, 1, 2), model=wide, modes=(("head", "sharded"),), prefetch=False).gathered_bytes()
    assert found == 4 * 4096 * 64


@pytest.mark.parametrize("strategy", [(1, 1, 1), (2, 2, 1), (1, 1, 2)])
@pytest.mark.parametrize(("prompt", "samples_per_prompt"), [(8, 1), (8, 4), (3000, 1), (5000, 1)])
def test_bytes_of_a_generation(strategy: tuple[int, ...], prompt: int, samples_per_prompt: int) -> None:
    """The cache, two arrays of the logits of a token a sequence (a GPU's: `test_a_decode_step_of_a_gpu`), and a prefill
    of all prompts or of a step's tokens."""
    dp, tp, pp = strategy
    lengths = Workload(prompt_tokens=prompt, new_tokens=8, samples_per_prompt=samples_per_prompt)
    per_part = 16 // dp // pp
    tokens = min(per_part // samples_per_prompt * prompt, max(PREFILL_TOKENS, prompt))
    of_group = pages(prompt, 8, samples_per_prompt)
    cache = pp * per_part // samples_per_prompt * of_group * 16 * (4 // pp) * A_TOKEN / tp
    logits = per_part * 32 * 4  # drawn from those of the whole vocabulary
    expected = cache + tokens * activation_elements(TINY, tp) * 4 + 2 * logits
    assert work(GENERATE, strategy, 1, lengths, full_logits=True).dynamic_bytes() == pytest.approx(expected)
    packed = work(GENERATE, strategy, 1, lengths, full_logits=True, packs_weights=True)
    assert packed.dynamic_bytes() == pytest.approx(expected + packed.placed.packed_bytes())
    assert packed.placed.packed_bytes() > 0
    graphs = work(GENERATE, strategy, 1, replace(lengths, decode_graphs="call"), on_gpus=True, full_logits=True)
    expected += graphs._step_bytes(per_part) - 2 * logits
    assert graphs.dynamic_bytes() == pytest.approx(expected + pp * 16 * (4 // pp) * A_TOKEN / tp)


@pytest.mark.parametrize(("strategy", "rings"), [((1, 1, 1), 0), ((1, 1, 2), 1), ((2, 2, 1), 0)])
@pytest.mark.parametrize("kind", [GENERATE, INFERENCE, TRAIN_STEP])
def test_a_worker_in_host_memory(kind: ModelInterfaceType, strategy: tuple[int, ...], rings: int) -> None:
    """Holes of an eighth, 16 MiB of a worker, and 16 MiB of messages between stages."""
    tensors = work(kind, strategy, 2).dynamic_bytes()
    on_host = work(kind, strategy, 2, in_host_memory=True).dynamic_bytes()
    assert on_host == 2**24 + rings * RING_BYTES + tensors * 9 / 8


def test_the_largest_part_of_a_generation_counts() -> None:
    """16 samples in three parts, of at most six: a page and a prompt for each on the first stage's two layers."""
    cache = 3 * 6 * 16 * 2 * A_TOKEN
    expected = cache + 6 * 8 * activation_elements(TINY, 1) * 4 + 2 * 6 * 32 * 4
    assert work(GENERATE, (1, 1, 3), 3, full_logits=True).dynamic_bytes() == pytest.approx(expected)


def test_bytes_of_an_inference() -> None:
    """Of whole samples in a part, at the longest: one layer's activations, two arrays of logits."""
    lengths = Workload(prompt_tokens=8, new_tokens=5, max_prompt_tokens=10, max_new_tokens=7)
    for (dp, tp, pp), micro_batches in (((1, 1, 1), 1), ((2, 2, 1), 4), ((1, 1, 2), 2), ((1, 1, 1), 3)):
        tokens = math.ceil(16 / dp / micro_batches) * 17
        expected = tokens * activation_elements(TINY, tp) * 2 + 2 * tokens * 32 / tp * 4
        found = work(INFERENCE, (dp, tp, pp), micro_batches, lengths, dtype="bfloat16").dynamic_bytes()
        assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    "recomputed", [Recomputed(), Recomputed("full"), Recomputed("full", 1), Recomputed("selective")]
)
@pytest.mark.parametrize(
    ("strategy", "num_layers", "micro_batches"),
    [
        ((1, 2, 1, 1), 5, 4), ((2, 1, 2, 1), 5, 4), ((1, 1, 2, 2), 5, 4), ((1, 1, 4, 1), 5, 4),
        ((1, 1, 2, 4), 11, 3),  # a moment has more whole layers in flight, another one more recomputed ones
    ],
)  # fmt: skip
@pytest.mark.parametrize("vocab_size", [32, 4096])
def test_bytes_of_a_training(
    recomputed: Recomputed, strategy: tuple[int, ...], num_layers: int, micro_batches: int, vocab_size: int
) -> None:
    """On the stage with the most: what is kept and what the backward pass has beside it; the largest product; logits
    on the last."""
    dp, tp, pp, chunks = strategy
    model, features = replace(TINY, vocab_size=vocab_size, num_layers=num_layers), {"logits_chunk_bytes": None}
    features |= {"recomputation": recomputed.kind, "recomputed_layers": recomputed.layers}
    engine, tokens = replace(ENGINE, **features), math.ceil(16 / dp / micro_batches) * 13

    def on_stage(stage: int) -> float:
        sizes = [len(chunk) for chunk in chunk_layers(num_layers, ParallelStrategy(*strategy), stage)]
        flights = layers_in_flight(num_layers, pp, chunks, stage, micro_batches, recomputed)
        kept = max(kept_bytes(model, "bfloat16", tp, each, engine) for each in flights)
        whole = min(size - recomputed.count(size) for size in sizes)
        beyond = beyond_kept_bytes(model, "bfloat16", tp, whole, engine)
        logits = 3 * tokens * vocab_size / tp * 4 if stage == pp - 1 else 0
        return tokens * (kept + beyond) + 64 * 128 // tp * 2 + logits

    found = work(TRAIN_STEP, strategy, micro_batches, model=model, dtype="bfloat16", **features).dynamic_bytes()
    assert found == pytest.approx(max(on_stage(0), on_stage(pp - 1)))


def test_a_training_gathers_beside_its_passes_and_updates_after_them() -> None:
    plain = work(TRAIN_STEP, (2, 1, 1), 1)
    gathers = work(TRAIN_STEP, (2, 1, 1), 1, fully_sharded=True)
    assert gathers.dynamic_bytes() == plain.dynamic_bytes() + gathers.gathered_bytes()
    large = replace(TINY, vocab_size=2**16)
    short = Workload(prompt_tokens=1)
    away = work(TRAIN_STEP, (1, 1, 1), 16, short, model=large, offloads_states=True, logits_chunk_bytes=1)
    assert away.dynamic_bytes() == away.placed.chunk_bytes() == (8 + 4) * (4 * LAYER + 2 * 2**16 * 64 + 64)
    inference = work(INFERENCE, (1, 1, 1), 16, short, model=large, offloads_states=True, logits_chunk_bytes=1)
    assert inference.dynamic_bytes() < away.dynamic_bytes()
    gathering = work(INFERENCE, (2, 1, 1), 1, fully_sharded=True)
    assert gathering.dynamic_bytes() == work(INFERENCE, (2, 1, 1), 1).dynamic_bytes(), "counted apart"


@pytest.mark.parametrize(
    ("features", "head", "dtype", "expected"),
    [
        ({"logits_chunk_bytes": None}, "lm", "float32", 10 * 32 / 2 * 4),
        ({"logits_chunk_bytes": None}, "lm", "bfloat16", 10 * 32 / 2 * 4),
        ({"logits_chunk_bytes": None}, "lm", "float64", 10 * 32 / 2 * 8),
        ({"logits_chunk_bytes": 100}, "lm", "float32", 100),
        ({"logits_chunk_bytes": 1000}, "lm", "float32", 640),
        ({"logits_chunk_bytes": 100, "full_logits": True}, "lm", "float32", 10 * 32 * 4),
        ({"logits_chunk_bytes": 1}, "scalar", "bfloat16", 10 * 4),
        ({"logits_chunk_bytes": 1}, "scalar", "float64", 10 * 8),
    ],
)
def test_bytes_of_logits(features: dict[str, Any], head: Any, dtype: Any, expected: float) -> None:
    found = work(INFERENCE, (1, 2, 1), model=TINY.with_head(head), dtype=dtype)
    placed = replace(found.placed, features=replace(ENGINE, **features))
    assert structs.replace(found, placed=placed)._logits_bytes(10) == expected


@pytest.mark.parametrize(
    ("pp", "chunks", "num_layers"), [(1, 1, 4), (2, 1, 5), (4, 1, 6), (2, 2, 5), (2, 3, 7), (3, 2, 8), (2, 4, 11)]
)
@pytest.mark.parametrize("recomputed", [Recomputed(), Recomputed("full"), Recomputed("full", 1)])
def test_layers_in_flight_are_those_of_the_schedule(
    pp: int, chunks: int, num_layers: int, recomputed: Recomputed
) -> None:
    """Every moment of the schedule is within one of those that are named, and each of these is such a moment."""
    strategy = ParallelStrategy(pp=pp, chunks=chunks)
    for stage in range(pp):
        for micro_batches in range(1, 3 * pp + 2):
            moments = set(moments_of(num_layers, strategy, stage, micro_batches, recomputed))
            found = layers_in_flight(num_layers, pp, chunks, stage, micro_batches, recomputed)
            assert set(found) == {
                (whole, again)
                for whole, again in moments
                if not any(a >= whole and b >= again and (a, b) != (whole, again) for a, b in moments)
            }
            assert len(set(found)) == len(found)
            assert all(isinstance(each, InFlight) for each in found)


def moments_of(
    num_layers: int, strategy: ParallelStrategy, stage: int, micro_batches: int, recomputed: Recomputed
) -> Iterator[tuple[int, int]]:
    waiting: list[int] = []
    sizes = [len(chunk) for chunk in chunk_layers(num_layers, strategy, stage)]
    for run in training_order(strategy.pp, stage, strategy.chunks, micro_batches):
        if run.is_forward:
            waiting.append(run.chunk)
        else:
            waiting.remove(run.chunk)
        again = sum(recomputed.count(sizes[chunk]) for chunk in waiting)
        yield sum(sizes[chunk] for chunk in waiting) - again, again


def test_what_a_training_shares_among_options() -> None:
    """Once for degrees of parallelism and ways to recompute; anew for each of other calls."""
    asked: list[int] = []

    def answer() -> float:
        asked.append(1)
        return float(len(asked))

    known: dict[Any, float] = {}

    def once(
        kind: ModelInterfaceType, strategy: tuple[int, ...], micro_batches: int, what: Any, **features: Any
    ) -> float:
        found = structs.replace(work(kind, strategy, micro_batches, **features), known=known)
        return found.once(what, answer)

    first = once(TRAIN_STEP, (2, 1, 1), 2, "a")
    assert first == 1.0
    assert once(TRAIN_STEP, (2, 1, 1), 2, "a") == first
    assert once(TRAIN_STEP, (2, 1, 1), 2, "a", zero1=False, offloads_states=True) == first
    assert once(TRAIN_STEP, (2, 1, 1), 2, "a", fully_sharded=True, prefetch=False) == first
    others = [
        once(TRAIN_STEP, (2, 1, 1), 2, "b"),
        once(TRAIN_STEP, (4, 1, 1), 2, "a"),
        once(TRAIN_STEP, (2, 2, 1), 2, "a"),
        once(TRAIN_STEP, (2, 1, 2), 2, "a"),
        once(TRAIN_STEP, (1, 2, 1), 2, "a"),
        once(TRAIN_STEP, (1, 1, 2), 2, "a"),
        once(TRAIN_STEP, (2, 1, 1), 1, "a"),
        once(TRAIN_STEP, (2, 1, 1), 2, "a", recomputation="full"),
        once(TRAIN_STEP, (2, 1, 1), 2, "a", recomputation="full", recomputed_layers=1),
        once(TRAIN_STEP, (2, 1, 1), 2, "a", sequence_parallel=True),
        once(INFERENCE, (2, 1, 1), 2, "a"),
        once(INFERENCE, (2, 1, 1), 2, "a"),
        once(GENERATE, (2, 1, 1), 2, "a"),
    ]
    assert others == [float(number) for number in range(2, 15)]


def test_bytes_of_a_training_are_of_its_chunks() -> None:
    """Options that differ in chunks share all else."""
    known: dict[Any, float] = {}
    for chunks in (1, 2):
        alone = work(TRAIN_STEP, (1, 1, 2, chunks), 4)
        shared = structs.replace(work(TRAIN_STEP, (1, 1, 2, chunks), 4), known=known)
        assert shared.dynamic_bytes() == alone.dynamic_bytes()
    assert math.isfinite(alone.dynamic_bytes())
