"""The converted directory in the user's cache: found again, noticed where it is damaged, made by one of several."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.api.model_source import model_source
from realhf.base.errors import UserError
from realhf.gguf import cache, folder
from realhf.gguf.cache import find_gguf, hugging_face_directory
from tests.unit.data.tokenizers_of_families import write_qwen
from tests.unit.gguf.files import random_model, tokenizer_fields, write_model


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    fields = tokenizer_fields(write_qwen(folder / "tokenizer"), "smollm")
    return write_model(folder / "model.gguf", random_model("llama", folder / "original"), "Q4_1", **fields)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of converted files, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "realhf" / "gguf"


def test_a_file_is_converted_once_wherever_it_lies(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = hugging_face_directory(file)
    (tmp_path / "copy.gguf").write_bytes(file.read_bytes())
    monkeypatch.setattr(folder, "GGUFModel", None)  # nothing is read again
    assert hugging_face_directory(tmp_path / "copy.gguf") == entry
    assert model_source(str(file)).checkpoint == str(entry)
    assert model_source(str(file)).tokenizer == str(entry)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "digests.json", "config.json"])
@pytest.mark.parametrize("damage", ["gone", "cut", "changed"])
def test_a_damaged_entry_is_made_anew(file: Path, name: str, damage: str) -> None:
    whole = {path.name: path.read_bytes() for path in hugging_face_directory(file).iterdir()}
    path = hugging_face_directory(file) / name
    content = bytearray(whole[name])
    content[len(content) // 2] ^= 1
    {"gone": path.unlink, "cut": lambda: os.truncate(path, 7), "changed": lambda: path.write_bytes(content)}[damage]()
    assert {path.name: path.read_bytes() for path in hugging_face_directory(file).iterdir()} == whole


def test_what_a_crash_left_is_no_entry_and_is_removed(file: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache, "write_atomically", die)
        patch.setattr(cache.shutil, "rmtree", lambda *_, **__: None)  # as where the process is killed
        with pytest.raises(KeyboardInterrupt):
            hugging_face_directory(file)
    assert len(list(place.glob(".*-*"))) == 2  # a half-written one, and the lock
    entry = hugging_face_directory(file)
    assert sorted(path.name for path in place.iterdir()) == sorted([entry.name, f".{entry.name}.lock"])


def test_processes_at_once_get_the_same_whole_entry(file: Path, place: Path) -> None:
    code = "import sys; from pathlib import Path; from realhf.gguf.cache import hugging_face_directory as made\n"
    code += "print(made(Path(sys.argv[1])))"
    words = [sys.executable, "-c", code, str(file)]
    processes = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    entries = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert entries == {str(hugging_face_directory(file))}
    assert len(list(place.iterdir())) == 2  # and the lock


def test_a_cache_that_cannot_be_written_is_named(file: Path, place: Path) -> None:
    place.parent.mkdir()
    place.write_text("no folder")
    with pytest.raises(UserError, match=r"model\.gguf cannot be written there \(.*\); make room, or name another"):
        hugging_face_directory(file)


def test_a_folder_means_its_only_file(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert find_gguf(folder) is None
    (folder / "one.gguf").write_bytes(file.read_bytes())
    assert model_source(str(folder)).checkpoint == str(hugging_face_directory(file))
    (folder / "two-00001-of-00002.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"has the GGUF files one\.gguf, two-00001-of-00002\.gguf; give one of them"):
        model_source(str(folder))
    (folder / "config.json").write_text("{}")
    assert find_gguf(folder) is None  # a Hugging Face directory that has such files too


def test_another_process_is_waited_for_until_a_deadline(
    file: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = hugging_face_directory(file)
    (entry / "config.json").unlink()
    monkeypatch.setattr(cache, "WAIT_S", 0.0)
    with (place / f".{entry.name}.lock").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process has been converting the same file for 0 minutes; wait"):
            hugging_face_directory(file)
    assert hugging_face_directory(file) == entry
