"""What a protocol makes of a device, and a model that an interface says it does not use."""

import pytest
import torch

from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.dataflow.protocols import ALL_TO_ALL, RANK_ZERO, THREE_D_PP_AS_DP, THREE_D_PROTO, TransferProtocol
from realhf.engine.returned import InterfaceError
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.worker.call_context import BatchShare, CallContext, UnusedModel, batch_share, sharing_ranks
from tests.unit.api.calls import call, rule

EIGHT = Layout(DeviceMesh(8, 8), ParallelStrategy(dp=2, tp=2, pp=2))


class Groups:
    """Names groups in place of making them."""

    def __init__(self, rank: int):
        self.rank = rank

    def of_ranks(self, ranks: list[int]) -> str:
        return f"of {ranks[0]} to {ranks[-1]}"

    def of_ranks_beside(self, ranks: list[int]) -> str:
        return f"beside, of {ranks[0]} to {ranks[-1]}"


def under(protocol: TransferProtocol) -> ModelFunctionCallDef:
    return call("judge", protocol=protocol)


def test_one_device_of_every_part_counts_and_has_its_outputs_taken() -> None:
    """By hand: (dp, tp) of devices 8 to 11 are 00 01 10 11, those of 12 to 15 too, in the second stage."""
    shares = {rank: batch_share(under(THREE_D_PP_AS_DP), EIGHT, Groups(rank)) for rank in EIGHT.mesh.devices}  # type: ignore[arg-type]
    assert [rank for rank, share in shares.items() if share.counts] == [8, 10, 12, 14]
    assert [rank for rank, share in shares.items() if share.holds_outputs] == [8, 10, 12, 14]
    assert {share.peers for share in shares.values()} == {"of 8 to 15"}


def test_groups_are_made_of_those_that_get_a_part() -> None:
    calls = [(under(protocol), EIGHT) for protocol in (THREE_D_PROTO, ALL_TO_ALL, RANK_ZERO)]
    assert sharing_ranks(calls) == [tuple(range(8, 16)), (8,)]
    assert sharing_ranks(calls, beside=True) == []


def test_calls_beside_the_devices_have_a_part_on_each_and_groups_of_their_own() -> None:
    """Their thread sums while that of the calls does."""
    judge, pair = rule("judge"), Layout(DeviceMesh(4, 2), ParallelStrategy(dp=2))
    assert sharing_ranks([(judge, pair), (under(ALL_TO_ALL), EIGHT)], beside=True) == [(4, 5)]
    for rank in (4, 5):
        share = batch_share(judge, pair, Groups(rank))  # type: ignore[arg-type]
        assert share == BatchShare(True, True, "beside, of 4 to 5", "beside, of 4 to 5")  # type: ignore[arg-type]


def context(counts: bool = True) -> CallContext:
    return CallContext(seed=0, step=0, share=BatchShare(True, counts, None), batch_size=4, samples_per_prompt=2)


def test_sums_without_peers() -> None:
    values = torch.tensor([1.5, 2.0])
    for counts in (True, False):
        assert torch.equal(context(counts).sum_over_data_parallel(values), values * counts)


def test_values_of_a_step_come_in_the_order_of_their_ids() -> None:
    rows = torch.tensor([[3.0, 30.0], [0.0, 10.0]], dtype=torch.float64)
    expected = torch.tensor([[0.0, 10.0], [0.0, 0.0], [0.0, 0.0], [3.0, 30.0]], dtype=torch.float64)
    assert torch.equal(context().in_order([3, 0], rows), expected)
    assert torch.equal(context(counts=False).in_order([3, 0], rows), torch.zeros(4, 2, dtype=torch.float64))
    assert context().in_order([1], torch.tensor([7])).tolist() == [0, 7, 0, 0], "whole numbers too"


def test_the_sign_of_a_zero_does_not_tell_how_many_ranks_there_are() -> None:
    assert not context().in_order([2], torch.tensor([-0.0])).signbit().any()


def test_a_value_has_to_be_there_for_every_sample() -> None:
    for values in (torch.zeros(3), torch.tensor(1.0)):
        with pytest.raises(InterfaceError, match=r"context\.in_order got values of shape \[.*\] for 2 samples"):
            context().in_order([0, 1], values)


def test_a_model_that_is_said_not_to_be_used_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"score: the interface has uses_model=False and asks for model\.forward"):
        UnusedModel(call("score", name="score")).forward()
    with pytest.raises(RuntimeError, match=r"judge: it runs beside the devices, without a model, and the interface "):
        UnusedModel(rule("judge")).forward()
