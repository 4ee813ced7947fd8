"""Distributions of lengths: order statistics, decode steps and attention against numbers worked out by hand."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from realhf.api.experiment import KeyLengths
from realhf.base.errors import UserError
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph, ModelInterfaceType
from realhf.geometry.layout import ParallelStrategy
from realhf.planning.model.call import CallModel
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.lengths import DecodePhase, LengthDistribution, read_lengths
from realhf.planning.model.timings import Costs, ProfiledTimings, TensorGroup, Timings
from realhf.planning.model.workload import Workload, workload_of
from realhf.planning.what_if import WhatIf
from tests.unit.planning.graphs import TINY, Stub, call, call_model, cpu_cluster
from tests.unit.planning.test_profile import profile

ALONE = ParallelStrategy()
CPU = load_hardware("cpu")


@dataclass(frozen=True, kw_only=True)
class StepTimings(Timings):
    """A layer of a decode step takes 2, 1 a sequence and 1 / 8 a token in the caches; no head, no embedding."""

    def decode_layer(self, sequences: float, context: float, group: TensorGroup) -> float:
        return 2 + sequences * (1 + context / 8)

    def embedding(self, *args: Any, **kwargs: Any) -> float:
        return 0.0

    def head(self, *args: Any, **kwargs: Any) -> float:
        return 0.0


Made = Callable[[Hardware], Timings]
QUICK = structs.replace(CPU, sampling_s=0.0, call_overhead_s=0.0)


def stepping(hardware: Hardware) -> Timings:
    return StepTimings(model=TINY, dtype="float32", hardware=hardware)


def analytic(hardware: Hardware) -> Timings:
    return Timings(model=TINY, dtype="float32", hardware=hardware)


def measured(hardware: Hardware) -> Timings:
    return ProfiledTimings.of(profile(), hardware)


def modelled(kind: ModelInterfaceType, lengths: Workload, samples: int = 2, timings: Made = stepping) -> CallModel:
    return call_model(
        call=call("m", TINY, kind, "x"),
        batch_size=samples,
        workload=lengths,
        cluster=cpu_cluster(8),
        costs=Costs(QUICK, {TINY: timings(QUICK)}),
        dtype="float32",
    )


def responding(responses: LengthDistribution | None, **others: Any) -> Workload:
    mean = responses.mean if responses else 5
    longest = responses.longest if responses else 5
    return Workload(prompt_tokens=8, **{"new_tokens": mean, "max_new_tokens": longest, "responses": responses} | others)


def test_longest_of_two_responses() -> None:
    """Three of four pairs of 1 or 5 tokens have a response of 5."""
    halves = LengthDistribution.of([1, 5])
    assert (halves.mean, halves.mean_square, halves.longest) == (3, 13, 5)
    assert halves.expected_longest(1) == 3
    assert halves.expected_longest(2) == 1 / 4 * 1 + 3 / 4 * 5
    # 4 steps with a probability of 3 / 4, each with 2 x 1/2 sequences of 2 where it takes place at all.
    assert halves.decode_phases(2) == (DecodePhase(steps=3.0, share=pytest.approx(2 / 3), tokens=2.5),)
    assert LengthDistribution.of([5, 5]).decode_phases(64) == (DecodePhase(4.0, 1.0, 2.5),)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 4))
def test_phases_add_up_to_all_draws(lengths: list[int], sequences: int) -> None:
    """Against all draws: the mean of the longest, of all steps of all sequences, and of the tokens in their caches."""
    found = LengthDistribution.of(lengths)
    draws = list(itertools.product(lengths, repeat=sequences))
    assert found.expected_longest(sequences) == pytest.approx(fmean(max(draw) for draw in draws))
    phases = found.decode_phases(sequences)
    steps = fmean(sum(draw) - sequences for draw in draws)
    assert sum(p.steps * p.share * sequences for p in phases) == pytest.approx(steps)
    cached = fmean(sum(sum(range(length)) for length in draw) for draw in draws)
    assert sum(p.steps * p.share * sequences * p.tokens for p in phases) == pytest.approx(cached)


def test_many_responses_reach_the_longest() -> None:
    """One of 10,000 is 1,000 tokens long: 1 - e^-1 of batches of 10,000 have it, and phases end with a sequence."""
    rare = LengthDistribution.of([10] * 9_999 + [1_000])
    assert rare.expected_longest(10_000) == pytest.approx(10 + 990 * (1 - (1 - 1e-4) ** 10_000), rel=1e-6)
    assert rare.expected_longest(10**9) == pytest.approx(1_000)
    assert rare.decode_phases(1)[-1].share == pytest.approx(1)


def test_responses_are_cut_at_the_limit() -> None:
    cut = LengthDistribution.of([2, 4, 6, 9]).capped(5)
    assert (cut.lengths, cut.shares) == ((2, 4, 5), (0.25, 0.25, 0.5))
    assert cut.capped(5) is cut
    at_a_length = LengthDistribution.of([2, 4, 6, 9]).capped(4)
    assert (at_a_length.lengths, at_a_length.shares) == ((2, 4), (0.25, 0.75))
    assert LengthDistribution.of([2, 4]).capped(1) == LengthDistribution((1,), (1.0,))


def test_lengths_that_no_response_has_are_refused() -> None:
    """Up to 2^24 tokens; how often a length occurs does not matter."""
    limits = LengthDistribution.of([1, 2**24])
    assert (limits.lengths, limits.shares) == ((1, 2**24), (0.5, 0.5))
    assert LengthDistribution.of(iter([3, 3, 3, 7])).shares == (0.75, 0.25)
    for lengths, length in (([0, 3, 5], 0), ([5, -2, 3], -2), ([3, 2**24 + 1], 2**24 + 1), ([0], 0)):
        with pytest.raises(UserError) as error:
            LengthDistribution.of(lengths)
        assert str(error.value) == (
            f"a response of {length} tokens: it must have 1 to 16777216; give a file with the tokens of one response "
            "a line, such as 417"
        )


def test_a_distribution_is_its_lengths_and_shares() -> None:
    """Whatever was asked of it."""
    one, other = LengthDistribution.of([1, 5]), LengthDistribution.of([5, 1])
    phases = one.decode_phases(3)
    assert one.decode_phases(3) is phases
    assert one == other
    assert hash(one) == hash(other)
    assert repr(one) == "LengthDistribution(lengths=(1, 5), shares=(0.5, 0.5))"
    assert replace(one, lengths=(1, 9)).decode_phases(3)[0].steps == 2 * phases[0].steps


def test_moments() -> None:
    drawn = LengthDistribution.of([1, 3, 3, 5])
    assert (drawn.mean, drawn.mean_square, drawn.variance) == (3.0, (1 + 9 + 9 + 25) / 4, 2.0)
    assert LengthDistribution.of([7, 7]).variance == 0.0
    nearly_equal = LengthDistribution((10**7, 10**7 + 1), (1 - 1e-5, 1e-5))
    assert nearly_equal.mean_square - nearly_equal.mean**2 < 0  # what is left of 10^14
    assert nearly_equal.variance == 0.0


def test_phases_end_where_the_running_sequences_halve() -> None:
    """Of four responses of 1 to 8 tokens (8 - t) / 8 are expected to run in the step after token t. The first phase is
    of more than a half, the second of more than a quarter, the third, of one and less, of what is left."""
    runs = {t: (8 - t) / 8 for t in range(1, 8)}
    phases = LengthDistribution.of(range(1, 9)).decode_phases(4)
    assert len(phases) == 3
    for phase, steps in zip(phases, ((1, 2, 3), (4, 5), (6, 7)), strict=True):
        expected = sum(1 - (1 - runs[t]) ** 4 for t in steps)
        running = sum(runs[t] for t in steps)
        assert phase.steps == pytest.approx(expected)
        assert phase.share == pytest.approx(running / expected)
        assert phase.tokens == pytest.approx(sum(t * runs[t] for t in steps) / running)


@pytest.mark.parametrize(("sequences", "phases"), [(0.5, 1), (1, 1), (1.5, 2), (2, 2), (3, 3), (4, 3), (5, 3), (64, 3)])
def test_the_last_phase_is_that_of_one_sequence(sequences: float, phases: int) -> None:
    """Of n sequences one runs after log2(n) halvings; before the longest response there are two halvings."""
    found = LengthDistribution.of([1, 2, 3, 4, 5, 6, 7, 7]).decode_phases(sequences)
    assert len(found) == phases


def test_many_steps_with_few_sequences_are_exact() -> None:
    """A response in 10^9 is longer: 10 sequences have it with a probability of 10^-8."""
    rare = LengthDistribution((10, 11), (1 - 1e-9, 1e-9))
    steps = [phase.steps for phase in rare.decode_phases(10)]
    assert steps[-1] == pytest.approx(1e-8, rel=1e-6)
    assert steps[0] == 9


def test_seconds_of_a_generation_by_hand() -> None:
    """Two sequences of 1 or 5 tokens, prompts of 8: 3 steps, 4 of a sequence, with 2.5 tokens of the response."""
    halves = LengthDistribution.of([1, 5])
    taken = modelled(GENERATE, responding(halves)).seconds(ALONE, 1)
    alike = modelled(GENERATE, responding(None)).seconds(ALONE, 1)
    layers = TINY.num_layers
    assert alike - taken == pytest.approx(layers * ((4 * 2 + 8 * (1 + 10.5 / 8)) - (3 * 2 + 4 * (1 + 10.5 / 8))))


def test_ranks_wait_for_the_longest_response_of_all() -> None:
    """Two ranks with a sequence each make the 3 steps of two sequences, and on average the 2 of their own."""
    halves = LengthDistribution.of([1, 5])
    call = modelled(GENERATE, responding(halves))
    both, alone = call.seconds(ParallelStrategy(dp=2), 1), modelled(GENERATE, responding(halves), 1).seconds(ALONE, 1)
    assert both - alone == pytest.approx(TINY.num_layers * 2 * (3 - 2))


@pytest.mark.parametrize("room", [None, 32, 48])
@pytest.mark.parametrize("strategy", [ALONE, ParallelStrategy(2, 1, 2), ParallelStrategy(1, 2, 1)])
@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_responses_of_one_length_change_nothing(
    room: int | None, strategy: ParallelStrategy, micro_batches: int
) -> None:
    same = LengthDistribution.of([5])
    for kind in (GENERATE, INFERENCE, TRAIN_STEP):
        given, plain = (modelled(kind, responding(responses, kv_cache_tokens=room), 16) for responses in (same, None))
        assert given.seconds(strategy, micro_batches) == pytest.approx(
            plain.seconds(strategy, micro_batches), rel=1e-12
        )
        assert (
            given.work(strategy, micro_batches).dynamic_bytes() == plain.work(strategy, micro_batches).dynamic_bytes()
        )


def test_waiting_sequences_take_the_places_of_those_that_end() -> None:
    """Room for one of two sequences: the four steps of one of them, and the other ends with its prompt."""
    halves = LengthDistribution.of([1, 5])
    call = modelled(GENERATE, responding(halves, kv_cache_tokens=16))
    assert call.work(ALONE, 1).decode_phases == (DecodePhase(4.0, 0.5, 2.5),)


def test_attention_grows_with_squares() -> None:
    """Sequences of 8 + 1 and 8 + 5 tokens: 22 tokens, 81 + 169 pairs; of 11 tokens each 242 pairs."""
    lengths = responding(LengthDistribution.of([1, 5]))
    alike = Workload(prompt_tokens=8, new_tokens=3)
    assert lengths.attended == pytest.approx(250 / 22)
    assert alike.attended == 11
    for kind, passes in ((INFERENCE, 1), (TRAIN_STEP, 3)):
        unequal, equal = (modelled(kind, each, 16, analytic).seconds(ALONE, 1) for each in (lengths, alike))
        flops = passes * TINY.num_layers * 16 * 2 * TINY.query_size * (250 - 242) / 2
        assert unequal - equal == pytest.approx(flops / CPU.flops("float32"))


def test_a_profile_is_of_sequences_that_are_alike() -> None:
    """Attention to 4 / 11 more tokens, with 128 FLOPs each, beside 2 x 40,960 of weights and 128 x 16 of attention."""
    lengths, alike = responding(LengthDistribution.of([1, 5])), Workload(prompt_tokens=8, new_tokens=3)
    tokens, weights = 16 * 11, 4 * 64 * 64 + 3 * 64 * 128
    for kind, a_token_s in ((INFERENCE, 1), (TRAIN_STEP, 1 + 2)):
        unequal, equal = (modelled(kind, each, 16, measured).seconds(ALONE, 1) for each in (lengths, alike))
        added = TINY.num_layers * tokens * a_token_s * 128 * (4 / 11) / (2 * weights + 128 * 16)
        assert unequal - equal == pytest.approx(added)


def test_prompts_of_a_data_set_differ() -> None:
    """Prompts of 2 and 10 tokens: a prefill has 12 tokens and 104 pairs, 2 x 6 tokens 72."""
    prompts = Workload(prompt_tokens=6, prompt_variance=16, max_prompt_tokens=10, new_tokens=1)
    alike = Workload(prompt_tokens=6, max_prompt_tokens=10, new_tokens=1)
    assert prompts.attended_prompt == pytest.approx(104 / 12)
    unequal, equal = (modelled(GENERATE, each, 2).seconds(ALONE, 1) for each in (prompts, alike))
    flops = TINY.num_layers * 2 * TINY.query_size * (104 - 72)
    assert unequal - equal == pytest.approx(flops / CPU.flops("float32"))


lengths_lists = st.lists(st.integers(2, 60), min_size=2, max_size=6)


@given(lengths_lists, st.data(), st.sampled_from([1, 2, 8]), st.sampled_from([1, 2, 4]))
def test_wider_distributions_are_never_faster(
    lengths: list[int], data: st.DataObject, dp: int, micro_batches: int
) -> None:
    """A token moved from a shorter response to a longer one, so that the mean stays: generation does not get faster,
    a training has as many tokens, and more pairs of them."""
    shorter, longer = sorted(
        data.draw(st.lists(st.sampled_from(range(len(lengths))), min_size=2, max_size=2, unique=True)),
        key=lambda i: (lengths[i], i),
    )
    moved = data.draw(st.integers(1, lengths[shorter] - 1))
    wider = list(lengths)
    wider[shorter] -= moved
    wider[longer] += moved
    narrow, wide = (responding(LengthDistribution.of(each), max_new_tokens=120) for each in (lengths, wider))
    assert wide.tokens == pytest.approx(narrow.tokens)
    strategy = ParallelStrategy(dp=dp)
    for timings in (stepping, analytic):
        faster, slower = (
            modelled(GENERATE, each, 32, timings).seconds(strategy, micro_batches) for each in (narrow, wide)
        )
        assert slower >= faster * (1 - 1e-9)
    works = [modelled(TRAIN_STEP, each, 32).work(strategy, 1) for each in (narrow, wide)]
    assert works[0].rows == pytest.approx(works[1].rows)
    assert wide.attended >= narrow.attended * (1 - 1e-9)


@dataclass(frozen=True, kw_only=True)
class Generates(Stub):
    max_new_tokens: int = 5
    samples_per_prompt: int = 1


@dataclass(frozen=True, kw_only=True)
class ReadsPairs(Stub):
    @property
    def sequence_keys(self) -> tuple[str, ...]:
        return "chosen", "rejected"


def with_interface(kind: ModelInterfaceType, interface: Any, reads: str, writes: str = "") -> Any:
    return replace(call("m", TINY, kind, reads, writes), interface_impl=interface)


def test_workload_of_an_experiment() -> None:
    graph = DataflowGraph(
        [with_interface(GENERATE, Generates(), "prompt", "seq"), call("r", TINY, INFERENCE, "seq", "reward")],
        ["prompt"],
    )
    lengths = {"prompt": KeyLengths(6.0, 10, 52.0)}
    found = workload_of(graph, lengths, responses=LengthDistribution.of([1, 9]))
    assert (found.new_tokens, found.max_new_tokens) == (3, 5)  # cut at 5
    assert found.text(2) == "6 + 3 (longest 4)"
    for name in graph.model_calls:
        assert (found.of(name).tokens, found.of(name).max_tokens) == (9, 15)
        assert found.of(name).attended == pytest.approx((52 + 2 * 6 * 3 + 13) / 9)
    plain = workload_of(graph, lengths)
    assert (plain.new_tokens, plain.responses, plain.text(2)) == (5, None, "6 + 5")


def test_both_sequences_of_a_pair_attend_alone() -> None:
    pairs = with_interface(TRAIN_STEP, ReadsPairs(), "chosen rejected")
    graph = DataflowGraph([pairs], ["chosen", "rejected"])
    lengths = {"chosen": KeyLengths(4.0, 4, 16.0), "rejected": KeyLengths(12.0, 12, 144.0)}
    found = workload_of(graph, lengths).of(pairs.name)
    assert (found.tokens, found.max_tokens, found.attended) == (16, 16, 160 / 16)


def test_lengths_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("3\n1\n\n3\n")
    assert read_lengths(path) == LengthDistribution((1, 3), (1 / 3, 2 / 3))
    assert WhatIf(response_lengths=path, model_types={"m": "llama3-7b"}).with_defaults().new_tokens == 3
    path.write_text("000000001 16777216")
    assert read_lengths(path).lengths == (1, 2**24)
    path.write_bytes(b"\xff")
    with pytest.raises(UserError, match="value 1 is"):
        read_lengths(path)
    for content, problem in (
        ("", "it is empty"),
        ("4\n0\n", "value 2 is '0', not a number from 1 to 16777216"),
        ("1 16777217", "value 2 is '16777217'"),
        ("0000000001", "value 1 is '0000000001'"),
        ("-3", "value 1 is '-3'"),
        ("\u0663", "value 1 is '\u0663'"),
        ("1234567890123456789x1234567", "value 1 is '1234567890123456789x', not"),
        ("5\nx 6\n", "value 2 is 'x'"),
        ("1.5", "'1.5'"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=problem):
            read_lengths(path)
    with pytest.raises(UserError, match="No such file"):
        read_lengths(tmp_path / "none")


@pytest.mark.parametrize("backward", [False, True])
def test_a_profile_holds_for_other_lengths_by_what_attention_adds(backward: bool) -> None:
    """Layers are measured at one length of sequences; longer ones attend to more, at the layer's own FLOP/s."""
    timings = ProfiledTimings.of(profile(), CPU)

    def layer_s(length: float) -> float:
        return timings.layer(64, length, TensorGroup(1), backward=backward, trains=False)

    own = profile().sequence_length
    curve = profile().tensor[0].layer_backward if backward else profile().tensor[0].layer_forward
    assert layer_s(own) == pytest.approx(curve.at(64))
    h, i = TINY.hidden_size, TINY.intermediate_size
    weights = 2 * h * h + 2 * h * TINY.num_kv_heads * TINY.head_dim + 3 * h * i
    share = 2 * h * 100 / (2 * weights + 2 * h * own)
    assert layer_s(own + 100) == pytest.approx(curve.at(64) * (1 + share))
    assert layer_s(own / 2) < layer_s(own)


def test_lengths_in_words() -> None:
    assert Workload(prompt_tokens=8, new_tokens=0).text(4) == "8"
    assert Workload(prompt_tokens=8, new_tokens=5).text(4) == "8 + 5"
    drawn = LengthDistribution((2, 6), (0.5, 0.5))
    longest = drawn.expected_longest(4)
    differ = Workload(prompt_tokens=8, new_tokens=4, max_new_tokens=6, responses=drawn)
    assert differ.text(4) == f"8 + 4 (longest {longest:.4g})"
