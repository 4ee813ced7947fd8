"""The profiler's parts that need one process: the sizes it takes, the lengths it packs, the way of a request."""

import pytest

from realhf.base.errors import RunError
from realhf.profiling.profiler import powers_of_two, spread_lengths
from realhf.profiling.reallocation_bench import fitted
from realhf.profiling.round_trip import ROUNDS, median_round_trip_s
from realhf.transport.codec import Codec
from realhf.transport.messages import CallFunction, Reply
from tests.waiting import PATIENCE_S


def test_powers_of_two_end_at_or_below_the_last():
    assert powers_of_two(16, 100) == [16, 32, 64]
    assert powers_of_two(1, 4) == [1, 2, 4]
    assert powers_of_two(1, 1) == [1]


@pytest.mark.parametrize("tokens", [16, 64, 1000, 4096])
@pytest.mark.parametrize(("mean", "spread"), [(17, 3), (17, 0), (600, 250), (2, 1), (1, 0)])
def test_lengths_sum_to_the_tokens_and_lie_around_the_mean(tokens, mean, spread):
    lengths = spread_lengths(tokens, mean, spread)
    assert sum(lengths) == tokens
    assert min(lengths) >= 1
    if tokens >= 10 * mean:
        assert tokens / len(lengths) == pytest.approx(mean, rel=0.06)
        # One below and above for rounding, a tenth because the number of sequences is a whole one.
        assert min(lengths) >= 0.9 * (mean - spread) - 1
        assert max(lengths) <= 1.1 * (mean + spread) + 1


def test_many_sequences_have_every_length_of_the_spread():
    assert set(spread_lengths(20 * 17 * 5, 17, 2)) == {15, 16, 17, 18, 19}


def test_a_request_as_large_as_its_batch_comes_back(tmp_path, monkeypatch):
    sizes_bytes = []
    plain_encode = Codec.encode

    def encode(codec, message):
        data = plain_encode(codec, message)
        if isinstance(message, CallFunction | Reply):
            sizes_bytes.append(len(data))
        return data

    monkeypatch.setattr(Codec, "encode", encode)
    for batch_size in (1, 2000):
        assert median_round_trip_s(tmp_path / str(batch_size), 0, 1, batch_size, PATIENCE_S) > 0
    assert len(sizes_bytes) == 2 * 2 * ROUNDS  # both ways
    # A sample is an id in the request; in the reply an id and a length for each of two outputs.
    assert sum(sizes_bytes[2 * ROUNDS :]) > sum(sizes_bytes[: 2 * ROUNDS]) + ROUNDS * 1999 * (1 + 2 * 2)


def test_workers_that_never_answer_are_a_named_failure(tmp_path):
    with pytest.raises(RunError, match=r"did not answer empty calls within 0\.3 s"):
        median_round_trip_s(tmp_path, 0, 2, batch_size=1, timeout_s=0.3)


def test_a_master_that_never_comes_is_a_named_failure(tmp_path):
    with pytest.raises(RunError, match="did not publish its address"):
        median_round_trip_s(tmp_path, 1, 2, batch_size=1, timeout_s=0.3)


def test_a_reallocation_is_a_latency_and_its_bytes():
    found = fitted(few_s=0.003, gained_s=0.004, few_bytes=1e6, gained_bytes=4e6)
    assert (found.latency_s, found.bandwidth) == (pytest.approx(0.002), pytest.approx(1e9))


@pytest.mark.parametrize("gained_s", [-0.001, 0.0, 1e-9])
def test_a_reallocation_lost_in_noise_is_not_free(gained_s):
    found = fitted(few_s=0.003, gained_s=gained_s, few_bytes=1e6, gained_bytes=2e6)
    assert (found.latency_s, found.bandwidth) == (0.0, pytest.approx(1e9))


def test_a_reallocation_of_nothing_but_bytes_has_no_latency():
    assert fitted(few_s=0.001, gained_s=0.004, few_bytes=1e6, gained_bytes=1e6).latency_s == 0.0
