"""Lengths of the calls of an experiment: means, maxima, variances and what is said of them, by hand."""

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest

from realhf.api.experiment import KeyLengths
from realhf.architecture.decoding import DECODE_GRAPHS
from realhf.base.errors import UserError
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph, ModelFunctionCallDef
from realhf.planning.model.lengths import LengthDistribution
from realhf.planning.model.workload import Workload, workload_of
from tests.unit.planning.graphs import TINY, Stub, call

DRAWN = LengthDistribution((2, 6), (0.5, 0.5))  # mean 4, variance 4


def test_what_is_left_out_of_a_workload() -> None:
    found = Workload(prompt_tokens=8)
    assert (found.new_tokens, found.max_prompt_tokens, found.max_new_tokens) == (0, 8, 0)
    assert (found.prompt_variance, found.sequences, found.responses, found.samples_per_prompt) == (0.0, 1, None, 1)
    assert (found.kv_cache_tokens, found.decode_graphs, found.calls) == (None, DECODE_GRAPHS, {})
    assert Workload(prompt_tokens=8.2, new_tokens=4.0).max_prompt_tokens == 9  # rounded up
    assert Workload(prompt_tokens=8.2, new_tokens=4.1).max_new_tokens == 5
    given = Workload(prompt_tokens=8.5, new_tokens=4, max_prompt_tokens=20, max_new_tokens=4)
    assert (given.max_prompt_tokens, given.max_new_tokens, given.max_tokens, given.tokens) == (20, 4, 24, 12.5)


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ({"prompt_tokens": 0}, "workload: prompt_tokens=0 must be above 0 and new_tokens=0 at least 0"),
        ({"prompt_tokens": 1, "new_tokens": -1}, "workload: prompt_tokens=1 must be above 0 and new_tokens=-1"),
        ({"prompt_tokens": 8, "max_prompt_tokens": 7}, "max_prompt_tokens=7 is below the mean prompt_tokens=8"),
        ({"prompt_tokens": 8, "new_tokens": 5, "max_new_tokens": 4}, "max_new_tokens=4 is below the mean new_tokens=5"),
    ],
)
def test_lengths_that_are_none(lengths: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=re.escape(text)):
        Workload(**lengths)


def test_lengths_of_one_call() -> None:
    own = Workload(prompt_tokens=3)
    found = Workload(prompt_tokens=8, calls={"a": own})
    assert found.of("a") == own
    assert found.of("b") == found


@pytest.mark.parametrize(
    ("workload", "prompt", "attended"),
    [
        (Workload(prompt_tokens=8, new_tokens=2), 8, 10),
        (Workload(prompt_tokens=8, new_tokens=2, prompt_variance=16.0), 8 + 2, 10 + 1.6),
        (Workload(prompt_tokens=8, new_tokens=4, max_new_tokens=6, responses=DRAWN, prompt_variance=8.0), 9, 12 + 1),
        (Workload(prompt_tokens=12, sequences=3, prompt_variance=6.0), 12.5, 4 + 0.5),
    ],
)
def test_tokens_that_are_attended_to(workload: Workload, prompt: float, attended: float) -> None:
    """What sequences differ by adds its variance over the mean."""
    assert workload.attended_prompt == pytest.approx(prompt)
    assert workload.attended == pytest.approx(attended)


def test_the_longest_response_in_words() -> None:
    alike = Workload(prompt_tokens=8.25, new_tokens=4, max_new_tokens=7)
    assert alike.longest_response(3) == 7.0
    assert alike.text(3) == "8.25 + 4"
    drawn = replace(alike, responses=DRAWN)
    # Two tokens, and four more unless all of two samples end there.
    assert drawn.longest_response(2) == pytest.approx(2 + 4 * 3 / 4)
    assert drawn.text(2) == "8.25 + 4 (longest 5)"
    assert Workload(prompt_tokens=12345.6).text(2) == "1.235e+04"


# --- of an experiment


@dataclass(frozen=True, kw_only=True)
class Generates(Stub):
    max_new_tokens: int = 5
    mean_new_tokens: float = 0.0
    samples_per_prompt: int = 1
    kv_cache_tokens: int | None = None
    decode_graphs: Any = None


@dataclass(frozen=True, kw_only=True)
class Reads(Stub):
    keys: tuple[str, ...] = ()

    @property
    def sequence_keys(self) -> tuple[str, ...]:
        return self.keys


def of(interface: Any, kind: Any, reads: str, writes: str = "", model: str = "m") -> ModelFunctionCallDef:
    return replace(call(model, TINY, kind, reads, writes), interface_impl=interface)


PROMPTS = {"prompt": KeyLengths(6.0, 10, 52.0)}  # mean, longest, mean square: a variance of 16


def test_a_generation_reads_prompts_and_writes_up_to_its_limit() -> None:
    interface = Generates(samples_per_prompt=4, kv_cache_tokens=640, decode_graphs="off")
    graph = DataflowGraph([of(interface, GENERATE, "prompt", "seq")], ["prompt"])
    expected = Workload(
        prompt_tokens=6.0, max_prompt_tokens=10, prompt_variance=16.0, new_tokens=5, max_new_tokens=5,
        samples_per_prompt=4, kv_cache_tokens=640, decode_graphs="off",
    )  # fmt: skip
    found = workload_of(graph, PROMPTS)
    assert found.calls == {"m_generate": expected}
    # Of all calls, neither the room nor the graphs are this one's.
    assert found == replace(expected, kv_cache_tokens=None, decode_graphs=DECODE_GRAPHS, calls=found.calls)
    more = workload_of(graph, PROMPTS, 7).calls["m_generate"]
    assert more == replace(expected, new_tokens=7, max_new_tokens=7)
    drawn = workload_of(graph, PROMPTS, 7, DRAWN).calls["m_generate"]
    assert drawn == replace(expected, new_tokens=4.0, max_new_tokens=7, responses=DRAWN)
    cut = workload_of(graph, PROMPTS, None, DRAWN).calls["m_generate"]
    assert cut == replace(expected, new_tokens=3.5, max_new_tokens=5, responses=LengthDistribution((2, 5), (0.5, 0.5)))
    shorter = DataflowGraph([of(replace(interface, mean_new_tokens=3.5), GENERATE, "prompt", "seq")], ["prompt"])
    assert workload_of(shorter, PROMPTS).calls["m_generate"] == replace(expected, new_tokens=3.5)
    assert workload_of(shorter, PROMPTS, 7).calls["m_generate"] == more, "what is asked stands instead of both"
    assert workload_of(shorter, PROMPTS, 7, DRAWN).calls["m_generate"] == drawn
    plain = workload_of(DataflowGraph([of(Generates(), GENERATE, "prompt", "seq")], ["prompt"]), PROMPTS)
    assert plain.calls["m_generate"].decode_graphs == DECODE_GRAPHS
    assert plain.calls["m_generate"].kv_cache_tokens is None


def test_prompts_that_are_alike_vary_by_nothing() -> None:
    """Where rounding makes the mean square the least bit smaller than the square of the mean."""
    graph = DataflowGraph([of(Generates(), GENERATE, "prompt", "seq")], ["prompt"])
    found = workload_of(graph, {"prompt": KeyLengths(6.0, 6, 36.0 - 1e-9)})
    assert found.prompt_variance == 0.0
    pairs = DataflowGraph([of(Reads(keys=("prompt",)), TRAIN_STEP, "prompt")], ["prompt"])
    assert workload_of(pairs, {"prompt": KeyLengths(6.0, 6, 36.0 - 1e-9)}).prompt_variance == 0.0


def test_a_generation_says_how_long_it_is() -> None:
    graph = DataflowGraph([of(Stub(), GENERATE, "prompt", "seq")], ["prompt"])
    text = (
        "m_generate: Stub has no max_new_tokens, so that the planner does not know how long it generates; add a field "
        "or property of that name"
    )
    with pytest.raises(UserError, match=re.escape(text)):
        workload_of(graph, PROMPTS)
    assert workload_of(graph, PROMPTS, 3).new_tokens == 3


def test_calls_behind_a_generation_read_what_it_wrote() -> None:
    """Where a call names sequences of the data set, these; of what was generated, prompt and response."""
    graph = DataflowGraph(
        [
            of(Generates(samples_per_prompt=2), GENERATE, "prompt", "seq"),
            of(Stub(), INFERENCE, "seq", "reward", "r"),
            of(Reads(keys=("seq", "answer")), INFERENCE, "seq answer", "score", "s"),
        ],
        ["prompt", "answer"],
    )
    lengths = {**PROMPTS, "answer": KeyLengths(3.0, 4, 10.0)}
    found = workload_of(graph, lengths)
    assert set(found.calls) == {"m_generate", "s_inference"}
    rollout = found.of("r_inference")
    assert (rollout.prompt_tokens, rollout.new_tokens, rollout.samples_per_prompt) == (6.0, 5, 2)
    # 11 tokens, at most 15, with a mean square of 11^2 + 16; and 3, at most 4.
    assert found.of("s_inference") == Workload(
        prompt_tokens=14.0, max_prompt_tokens=19, sequences=2, prompt_variance=pytest.approx(137 + 10 - 14**2 / 2)
    )


def test_calls_without_a_generation_read_the_data() -> None:
    """The sequences that they name, or the first key that they read."""
    graph = DataflowGraph(
        [
            of(Reads(keys=("chosen", "rejected")), INFERENCE, "chosen rejected", "score", "a"),
            of(Stub(), TRAIN_STEP, "chosen score", "", "b"),
        ],
        ["chosen", "rejected"],
    )
    lengths = {"chosen": KeyLengths(4.0, 5, 17.0), "rejected": KeyLengths(12.0, 20, 150.0)}
    found = workload_of(graph, lengths)
    pair = Workload(prompt_tokens=16.0, max_prompt_tokens=25, sequences=2, prompt_variance=17 + 150 - 16**2 / 2)
    alone = Workload(prompt_tokens=4.0, max_prompt_tokens=5, prompt_variance=1.0)
    assert found.calls == {"a_inference": pair, "b_train_step": alone}
    assert found == replace(pair, calls=found.calls)


def test_the_lengths_of_all_calls_are_those_of_the_generation() -> None:
    """Wherever it stands in the graph, and whatever it reads beside its prompts."""
    graph = DataflowGraph(
        [
            of(Reads(keys=("answer",)), INFERENCE, "answer", "score", "s"),
            of(Generates(), GENERATE, "prompt picture", "seq"),
        ],
        ["prompt", "picture", "answer"],
    )
    lengths = {**PROMPTS, "picture": KeyLengths(700.0, 700, 490000.0), "answer": KeyLengths(3.0, 4, 10.0)}
    found = workload_of(graph, lengths)
    assert (found.prompt_tokens, found.max_prompt_tokens, found.new_tokens) == (6.0, 10, 5)
    assert found.calls["m_generate"].prompt_tokens == 6.0
    assert found.calls["s_inference"].prompt_tokens == 3.0


def test_a_sequence_that_no_data_has_is_empty_without_a_generation() -> None:
    graph = DataflowGraph(
        [
            of(Stub(), INFERENCE, "chosen", "score", "a"),
            of(Reads(keys=("chosen", "score")), TRAIN_STEP, "chosen score", "", "b"),
        ],
        ["chosen"],
    )
    found = workload_of(graph, {"chosen": KeyLengths(4.0, 5, 17.0)}).calls["b_train_step"]
    assert found == Workload(prompt_tokens=4.0, max_prompt_tokens=5, sequences=2, prompt_variance=17 - 4**2 / 2)
