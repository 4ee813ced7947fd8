"""Finds the kind of a data set's path: a file of a known format, a folder of such files, or a folder saved by
`datasets`."""

import glob
import re
from difflib import get_close_matches
from pathlib import Path

from realhf.api.model_source import HUB_NAME
from realhf.base.errors import UserError
from realhf.base.files import BadContentError, decode_loose_json, open_regular, read_bytes
from realhf.data.files.arrow import open_arrow, open_parquet
from realhf.data.files.jsonl import JSONLFile
from realhf.data.files.rows import RowFile, Shards
from realhf.data.tasks import meant, rewards_of, task_file

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")
FORMATS = "JSONL (one object a line), parquet, or a folder that `datasets` saved (save_to_disk)"
_OF_MODELS = ("config.json", "tokenizer.json")
# The first bytes of common files that are no data files.
_ARCHIVES = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstandard", b"BZh": "bzip2"}
_START_BYTES = 8  # as many as a format is known by, and more
_SPLIT = re.compile(r"(?:train|training|test|testing|validation|valid|val|dev|eval)(?=[-_.])")


def open_rows(path: str) -> RowFile:
    """The rows of a data set.

    Args:
        path: a file; a folder of files, which are taken in the order of their names; a pattern of file names
            (`data/train-*.parquet`); a folder that `datasets` saved; or the name of a task (`realhf.data.tasks`).

    Raises:
        UserError: there is no such file, the format is not known, or there is no row.
    """
    try:
        files = [_open_file(file) for file in data_files(path)]
        rows = files[0] if len(files) == 1 else Shards(files)
    except OSError as error:
        what = (error.strerror or str(error)).lower()
        raise UserError(f"data set {path}: {what}; {meant(path) or _remedy(Path(path))}") from None
    if not len(rows):
        what = "the file is empty" if Path(path).is_file() else "its files are empty"
        raise UserError(f"data set {path}: {what}; it needs at least one line")
    return rows


def _remedy(path: Path) -> str:
    """For a path that cannot be read: the name that is meant, the data files there are, or how to get a hub's data."""
    if not path.parent.is_dir():
        if HUB_NAME.fullmatch(str(path)) and path.suffix not in SUFFIXES:
            load = f"datasets.load_dataset('{path}', split='train').to_json('train.jsonl')"
            return f"nothing is downloaded: save a data set of the Hugging Face hub first, {load}"
        return f"there is no folder {path.parent}; correct the path"
    files = (file for file in path.parent.iterdir() if file.suffix in SUFFIXES)
    names = sorted(file.name for file in files if file.name not in _OF_MODELS)
    if meant := get_close_matches(path.name, names, 1, cutoff=0.85):
        return f"did you mean {path.with_name(meant[0])}?"
    return f"correct the path (the folder has {', '.join(names[:8])})" if names else "correct the path"


def data_files(path: str) -> list[Path]:
    """The files of a data set, in order. Raises as `open_rows` does, and OSError."""
    if rewards_of(path):
        return [task_file(path)]
    place = Path(path)
    if not place.exists() and glob.has_magic(path):
        found = sorted(Path(name) for name in glob.glob(path, recursive=True) if Path(name).is_file())
        if not found:
            raise UserError(f"data set {path}: no file has such a name; correct the pattern")
        return found
    if not place.is_dir():
        place.stat()
        return [place]
    if (place / "dataset_dict.json").is_file():
        splits = ", ".join(_json_list(place / "dataset_dict.json", "splits"))
        raise UserError(f"data set {path}: it has the splits {splits}; give the folder of one, {path}/SPLIT")
    if (place / "state.json").is_file():
        return [place / name for name in _json_list(place / "state.json", "_data_files")]
    return _shards(place)


def _shards(folder: Path) -> list[Path]:
    if any((folder / name).is_file() for name in _OF_MODELS):
        raise UserError(f"data set {folder}: this is the directory of a model, not of data; give {FORMATS}")
    found = [
        file
        for file in sorted(folder.iterdir())
        if file.suffix in SUFFIXES and file.is_file() and not file.name.startswith((".", "_"))
    ]
    if not found:
        inside = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) or "nothing"
        raise UserError(
            f"data set {folder}: no file of {', '.join(SUFFIXES)} in this folder, which has {inside}; give {FORMATS}"
        )
    kinds = sorted({file.suffix for file in found})
    if len(kinds) > 1:
        raise UserError(
            f"data set {folder}: it has files of {' and '.join(kinds)}; give a pattern, {folder}/*{kinds[0]}"
        )
    splits = {match[0]: file for file in reversed(found) if (match := _SPLIT.match(file.name))}
    if len(splits) > 1:
        first = min(splits.values())
        raise UserError(
            f"data set {folder}: it has files of the splits {', '.join(sorted(splits))}; give a pattern that takes "
            f"one, {folder}/{_SPLIT.match(first.name)[0]}*{kinds[0]}"  # type: ignore[index]
        )
    return found


def _json_list(path: Path, name: str) -> list[str]:
    """A list of names in a file of `datasets`: texts, or objects with a `filename`."""
    try:
        entries = decode_loose_json(read_bytes(path))[name]
        return [entry if isinstance(entry, str) else str(entry["filename"]) for entry in entries]
    except (BadContentError, KeyError, TypeError) as error:
        raise UserError(f"{path}: no file of `datasets` ({type(error).__name__}: {error}); save it again") from None


def _open_file(path: Path) -> RowFile:
    with open_regular(path) as file:
        start = file.read(_START_BYTES)
    if start.startswith(b"PAR1"):
        return open_parquet(path)
    if start.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return open_arrow(path)
    for magic, name in _ARCHIVES.items():
        if start.startswith(magic):
            raise UserError(f"data set {path}: it is compressed ({name}), and rows are read in any order; unpack it")
    if path.suffix in (".csv", ".tsv", ".xlsx", ".parquet", ".arrow", ".safetensors", ".bin") and start:
        remedy = f"datasets.load_dataset({path.suffix[1:]!r}, data_files={path.name!r})['train'].to_json('rows.jsonl')"
        hint = f" (`{remedy}` converts it)" if path.suffix == ".csv" else ""
        raise UserError(f"data set {path}: no known format; give {FORMATS}{hint}")
    return JSONLFile(path)
