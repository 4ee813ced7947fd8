"""How a run is asked to end."""

from pathlib import Path

import pytest

from realhf.rundir.status import EndRequest, request_end, requested_end


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (EndRequest(reason="asked"), "as was asked"),
        (EndRequest(reason="notice", goes_on=True), "at the notice that its job was about to end"),
    ],
)
def test_what_is_asked_is_read_back(request_: EndRequest, words: str, tmp_path: Path) -> None:
    assert requested_end(tmp_path / "stop") is None
    request_end(tmp_path / "stop", request_)
    assert requested_end(tmp_path / "stop") == request_
    assert request_.in_words == words


@pytest.mark.parametrize("content", [b"", b"\xff", b"{}", b'{"reason":"tired"}'])
def test_who_writes_a_file_of_that_name_means_it(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "stop").write_bytes(content)
    assert requested_end(tmp_path / "stop") == EndRequest(reason="asked", goes_on=False)


def test_what_cannot_be_read_asks_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "stop").mkdir()
    assert requested_end(tmp_path / "stop") is None
