"""Which of its addresses a host tells others."""

import pytest

from realhf.base.errors import UserError
from realhf.machine.network import addresses, choose_address, in_words, source_of

TWO = {"lo": ["127.0.0.1"], "dec0": ["192.168.1.1"], "ib0": ["10.0.0.4", "fd00::4"]}
ONE = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.4"]}


@pytest.mark.parametrize(
    ("interface", "resolved", "interfaces", "chosen"),
    [
        ("ib0", ["192.168.1.1"], TWO, "10.0.0.4"),
        ("=ib0", [], TWO, "10.0.0.4"),
        ("ib", [], TWO, "10.0.0.4"),
        ("dec0,ib0", [], TWO, "192.168.1.1"),
        ("^docker0", ["10.0.0.4"], TWO, "10.0.0.4"),
        (None, ["192.168.1.1"], TWO, "192.168.1.1"),
        (None, ["127.0.1.1", "10.0.0.4"], TWO, "10.0.0.4"),
        (None, ["127.0.1.1"], ONE, "10.0.0.4"),
        (None, [], ONE, "10.0.0.4"),
    ],
)
def test_the_interface_decides_then_the_name_then_the_only_one(
    interface: str | None, resolved: list[str], interfaces: dict[str, list[str]], chosen: str
) -> None:
    assert choose_address("host1", interface, resolved, interfaces) == chosen


@pytest.mark.parametrize(
    ("resolved", "said"), [(["127.0.1.1"], "resolves to 127.0.1.1 only"), ([], "does not resolve")]
)
def test_where_it_is_not_known_the_options_are_named(resolved: list[str], said: str) -> None:
    with pytest.raises(UserError) as error:
        choose_address("host1", None, resolved, TWO)
    assert f"the host name host1 {said}" in str(error.value)
    assert "its interfaces are dec0 192.168.1.1; ib0 10.0.0.4, fd00::4: name the one" in str(error.value)
    assert "--network-interface" in str(error.value)
    assert "--master-address" in str(error.value)


def test_an_interface_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"--network-interface ib7: host1 has no such interface; it has dec0 192\.168"):
        choose_address("host1", "ib7", ["10.0.0.4"], TWO)


def test_this_host() -> None:
    assert "127.0.0.1" in addresses()["lo"]
    assert in_words(source_of("127.0.0.1")) == "127.0.0.1 (lo)"
    assert in_words("192.0.2.1") == "192.0.2.1 (no interface of this host)"
    assert source_of("no-such-host.invalid") == ""
