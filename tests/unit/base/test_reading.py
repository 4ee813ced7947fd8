"""Files from outside: what is opened, and how much of it is read and decoded."""

import errno
import json
import os
import re
import socket
from pathlib import Path

import pytest

from realhf.base.errors import RunError, UserError
from realhf.base.files import (
    MAX_DEPTH,
    BadContentError,
    decode_json,
    decode_loose_json,
    decode_yaml,
    last_lines,
    lines_within,
    open_regular,
    read_bytes,
    read_file,
    read_text,
    write_atomically,
    writing_a_run,
)

ROOT = Path(__file__).parents[3]


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def test_a_regular_file_and_a_link_to_one_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_bytes(tmp_path / "file") == read_bytes(tmp_path / "link") == b"content"
    assert read_text(tmp_path / "file") == "content"


@pytest.mark.parametrize("mode", ["rb", "wb", "ab", "a+b", "r+b"])
def test_nothing_but_a_regular_file_is_opened(mode, tmp_path):
    pipe(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "socket"))
    for path in (tmp_path / "pipe", tmp_path / "folder", tmp_path / "socket", Path("/dev/zero")):
        with pytest.raises(OSError) as refused:  # noqa: PT011 (its number differs)
            open_regular(path, mode)
        assert refused.value.strerror
        assert str(path) == refused.value.filename
    listening.close()


def test_a_link_to_a_pipe_is_no_file(tmp_path):
    (tmp_path / "link").symlink_to(pipe(tmp_path / "pipe"))
    with pytest.raises(OSError, match="a pipe instead of a regular file"):
        read_bytes(tmp_path / "link")


@pytest.mark.parametrize("mode", ["wb", "ab", "a+b", "r+b", "xb"])
def test_nothing_is_written_through_a_link(mode, tmp_path):
    (tmp_path / "other").write_bytes(b"kept")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    with pytest.raises(OSError) as refused:  # noqa: PT011
        open_regular(tmp_path / "link", mode)
    assert refused.value.errno in (errno.ELOOP, errno.EEXIST)
    assert (tmp_path / "other").read_bytes() == b"kept"


def test_a_file_is_emptied_when_it_is_written_anew(tmp_path):
    (tmp_path / "file").write_bytes(b"before")
    with open_regular(tmp_path / "file", "wb") as file:
        file.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_link_in_the_place_of_a_half_written_file_is_not_followed(tmp_path):
    (tmp_path / "other").write_bytes(b"kept")
    (tmp_path / f".status.json.{os.getpid()}.part").symlink_to(tmp_path / "other")
    write_atomically(tmp_path / "status.json", b"new")
    assert (tmp_path / "status.json").read_bytes() == b"new"
    assert (tmp_path / "other").read_bytes() == b"kept"
    assert not (tmp_path / "status.json").is_symlink()


def test_what_stands_in_the_way_of_a_run_is_named_with_a_remedy(tmp_path):
    with pytest.raises(RunError, match=r"pipe cannot be written \(it is a pipe.*see who put it there"), writing_a_run():
        open_regular(pipe(tmp_path / "pipe"), "r+b")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(RunError, match="see who put a link there"), writing_a_run():
        open_regular(tmp_path / "link", "ab")


def test_a_file_is_read_up_to_its_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bytes(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_bytes(tmp_path / "file", 4)


def test_a_file_that_a_user_names_is_refused_in_words(tmp_path):
    with pytest.raises(UserError, match=r"cannot read the plan \(it is a pipe instead of a regular file\); remedy"):
        read_file(pipe(tmp_path / "pipe"), lambda data: data, "plan", "remedy")


def test_lines_that_are_too_long_are_left_out(tmp_path):
    (tmp_path / "file").write_bytes(b"1234\n12345\n123\n" + b"x" * 50 + b"\nlast")
    with open_regular(tmp_path / "file") as file:
        assert list(lines_within(file, 5)) == [b"1234\n", None, b"123\n", None, b"last"]
    (tmp_path / "file").write_bytes(b"x" * 50)
    with open_regular(tmp_path / "file") as file:
        assert list(lines_within(file, 5)) == [None]


def test_the_last_lines_of_a_log_are_its_last_ones(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"x" * 10**6 + b"\none\ntwo\n")
    assert last_lines(log, 2) == "\n  | one\n  | two"
    assert last_lines(pipe(tmp_path / "pipe"), 2) == ""


def nested(depth: int, begin: str = "[", end: str = "]", inner: str = "") -> str:
    return begin * depth + inner + end * depth


@pytest.mark.parametrize("decode", [lambda text: decode_json(text, object), decode_loose_json])
def test_json_is_decoded_up_to_a_depth(decode):
    for begin, end, inner in (("[", "]", ""), ('{"a":', "}", "1"), ('[{"a":', "}]", "1")):
        levels = begin.count("[") + begin.count("{")
        good = nested(MAX_DEPTH // levels, begin, end, inner)
        assert decode(good) == json.loads(good)
        for depth in (MAX_DEPTH // levels + 1, 500, 100_000):
            with pytest.raises(BadContentError, match="nested too deeply"):
                decode(nested(depth, begin, end, inner).encode())
    # What lies side by side is not deep, nor is what stands in texts.
    beside = [[[i], {"a": [i]}] for i in range(200)]
    assert decode(json.dumps(beside)) == beside
    texts = ["[" * 500, '\\"[{' * 50, "]"]
    assert decode(json.dumps(texts)) == texts
    with pytest.raises(BadContentError):  # never closed
        decode("[" * 100_000)


def test_loose_json_takes_what_other_programs_write_and_says_what_is_broken():
    assert decode_loose_json('{"a": "\\ud800", "b": Infinity}') == {"a": "\ud800", "b": float("inf")}
    for text in ("{", b"\xff", "9" * 5000):
        with pytest.raises(BadContentError):
            decode_loose_json(text)


def test_yaml_is_decoded_up_to_a_depth_and_a_number_of_values():
    good = nested(MAX_DEPTH)
    assert decode_yaml(good, object) == json.loads(good)
    for text in (nested(MAX_DEPTH + 1), nested(500), nested(100_000), "a: &a [*a]\n"):
        with pytest.raises(BadContentError):
            decode_yaml(text, object)
    once, doubled = "a0: &a0 [1, 1]\n", "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    with pytest.raises(BadContentError, match="more than 1,000,000 values"):
        decode_yaml(once + doubled, object)
    assert decode_yaml("a: &a [1, 2]\nb: *a\n", dict[str, list[int]]) == {"a": [1, 2], "b": [1, 2]}
    assert decode_yaml("a: 1e9", dict[str, float], strict=False) == {"a": 1e9}


# What these read is no file from outside: Python sources of the user, files of the kernel, of the test of a disk.
MAY_OPEN = {
    "realhf/base/files.py",
    "realhf/cli/doctor.py",
    "realhf/cpu/host_group.py",
    "realhf/dataflow/interface.py",
    "realhf/experiments/__init__.py",
    "realhf/launch/local.py",
    "realhf/machine/host.py",
    "realhf/machine/torch_build.py",
    "realhf/parallel/linear.py",
    "realhf/rewards/driver.py",
    "realhf/rewards/process.py",
    "realhf/worker/memory_use.py",
}
# Of its own process, or the other end of a pipe that it holds.
MAY_DECODE = {
    "realhf/architecture/transformers_config.py",
    "realhf/base/files.py",
    "realhf/data/files/jsonl.py",
    "realhf/lifecycle/resume.py",
    "realhf/models/checkpoint_index.py",
    "realhf/models/convert.py",
    "realhf/models/transformers_models.py",
    "realhf/profiling/nodes.py",
    "realhf/rewards/confined.py",
    "realhf/rewards/unit_tests.py",
    "realhf/worker/reachability.py",
}


OPENS = re.compile(r"""\.read_(bytes|text)\((?=\)|errors|encoding)|(?<![\w.])(?<!def )open\(|\.open\((?=["'])""")
DECODES = re.compile(r"(?<!\w)(json\.loads?|msgspec\.(json|yaml)\.decode|yaml\.(safe_)?load|tomllib\.loads?)\(")


def test_no_other_module_opens_or_decodes_a_file_by_itself():
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "realhf").rglob("*.py")}
    # The processes of rewards read /proc, and pipes that they hold.
    texts = {file: text for file, text in texts.items() if not re.match(r"realhf/rewards/(?!server|sources)", file)}
    opens = {file for file, text in texts.items() if OPENS.search(text)}
    decodes = {file for file, text in texts.items() if DECODES.search(text)}
    assert opens - MAY_OPEN == set(), "use open_regular, read_bytes or read_text of realhf.base.files"
    assert decodes - MAY_DECODE == set(), "use decode_json, decode_loose_json or decode_yaml of realhf.base.files"
