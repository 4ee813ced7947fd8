"""The store answers what is due, to whom it is due, and stays small."""

import pytest

from realhf.master import key_value_store
from realhf.master.key_value_store import KeyValueStore
from realhf.transport.messages import (
    AddToKey,
    CheckKeys,
    SetKey,
    StoreReply,
    StoreRequest,
    WaitForKeys,
)


def put(key: str, value: bytes = b"v", request_id: int = 1) -> SetKey:
    return SetKey(request_id=request_id, key=key, value=value)


def wait(*keys: str, request_id: int = 9) -> WaitForKeys:
    return WaitForKeys(request_id=request_id, keys=keys)


def test_a_wait_is_answered_when_the_last_of_its_keys_comes() -> None:
    store = KeyValueStore(3)
    assert store.answers(1, wait("a", "b")) == []
    assert store.answers(2, wait("b", "a", request_id=5)) == []
    done = StoreReply(request_id=1)
    assert store.answers(0, put("c")) == [(0, done)]
    assert store.answers(0, put("b", b"of b")) == [(0, done)]
    ended = [(1, StoreReply(request_id=9, value=b"of b")), (2, StoreReply(request_id=5, value=b"of a"))]
    assert store.answers(0, put("a", b"of a")) == [(0, done), *ended]
    assert store.answers(0, put("a")) == [(0, done)], "once"
    assert store.answers(1, wait()) == [(1, StoreReply(request_id=9))]


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (put("large", bytes(2**20)), "large: 1048581 bytes are over the store's limit of 1048576"),
        (put("k" * (2**20 + 1), b""), f"{'k' * 80}: 1048577 bytes are over"),
        (wait(*["k" * 1024] * 1024, request_id=1), "bytes are over the store's limit"),
        (AddToKey(request_id=1, key="max", amount=1), "max: the sum has more than 64 bits"),
        (AddToKey(request_id=1, key="text", amount=1), "invalid literal for int"),
        (put("a sixth"), "the store is full: it takes 6 keys and waits"),
        (wait("a seventh", request_id=1), "the store is full"),
    ],
)
def test_a_request_over_a_limit_is_refused_and_the_store_goes_on(
    request_: StoreRequest, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_value_store, "MOST_ENTRIES", 3)
    store = KeyValueStore(2)
    for key, value in {"max": str(2**63 - 1).encode(), "text": b"text", "a": b"", "b": b""}.items():
        store.answers(0, put(key, value))
    store.answers(1, wait("sixth"))
    if "full" in said:
        store.answers(0, put("fifth"))
    ((to, reply),) = store.answers(1, request_)
    assert (to, reply.request_id) == (1, 1)
    assert said in reply.error
    assert store.answers(0, CheckKeys(request_id=2, keys=("max", "text"))) == [(0, StoreReply(request_id=2, number=1))]


def test_a_store_that_is_full_takes_more_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_value_store, "MOST_ENTRIES", 2)
    store = KeyValueStore(1)
    store.answers(0, put("a"))
    store.answers(0, wait("b", "c"))
    assert store.answers(0, put("b"))[0][1].error != "", "a key and a wait"
    assert store.answers(0, put("a", b"new"))[0][1].error == ""
