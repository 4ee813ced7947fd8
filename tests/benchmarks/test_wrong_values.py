"""One fault of each kind that changes values and stops nothing: its call and step are named."""

import random

import pytest
from lib.value_faults import EXPECTED, Campaign, drawn, fault_of

from tests.e2e.forked import ForkedLauncher

pytestmark = pytest.mark.distributed

AS_IT_HAPPENED = ("bit of the actor", "bit of the reference", "stale copy")


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return Campaign(tmp_path_factory.mktemp("values"), ForkedLauncher)


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_fault_is_named_by_its_call_and_step(campaign: Campaign, kind: str) -> None:
    told = campaign.told(fault_of(kind, random.Random(0)))
    assert told.seen == ("as it happened" if kind in AS_IT_HAPPENED else "by verify"), told.words


def test_faults_are_of_all_kinds_and_those_of_a_seed() -> None:
    faults = [*drawn(40, 1)]
    assert faults == [*drawn(40, 1)] != [*drawn(40, 2)]
    assert {fault.kind for fault in faults[:10]} == {*EXPECTED}
    assert all(fault.step for fault in faults if fault.kind == "stale copy")
