"""The index of a checkpoint: the file that holds each box. No torch here: the master completes checkpoints.

A checkpoint is a directory of `boxes-<rank>.safetensors` files and an `index.json`. Every owner writes its file into
a staging directory beside the target (`realhf.models.checkpoint.write_snapshot`). Then one process checks the files,
writes the index and renames the directory (`finish`), so a directory with the final name is always complete.
"""

import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import msgspec

from realhf.api.experiment import ModelSetup
from realhf.architecture.compute import DataParallel
from realhf.architecture.model import DecoderConfig, DType
from realhf.base.errors import UserError
from realhf.base.files import (
    BadContentError,
    decode_json,
    file_digest,
    open_regular,
    read_bytes,
    read_text,
    sync_directory,
    write_atomically,
)
from realhf.base.safetensors_header import ITEM_BYTES
from realhf.geometry.boxes import Box
from realhf.geometry.layout import Layout
from realhf.geometry.parameters import decoder_parameters
from realhf.geometry.shards import shard_boxes

FORMAT = "realhf-checkpoint/1"
INDEX_FILE = "index.json"
# In the metadata of a checkpoint with optimizer states: how many optimizer steps had been made.
STEPS_KEY = "optimizer_steps"

SAFETENSORS_DTYPE: dict[str, str] = {"float32": "F32", "float64": "F64", "bfloat16": "BF16"}
_MAX_HEADER_BYTES = 10**8  # the limit of the safetensors library
_MAX_DIMENSIONS = 8
_THREADS = 8  # hashing is bound by one core a file


class SavedBox(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One box in a file, of `name`: a parameter, or `<parameter>@<kind>` for a state of it.

    `key` is its key in the file, if that is not the name.
    """

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    key: str = ""

    @property
    def box(self) -> Box:
        return Box(self.name, self.offset, self.shape)


class SavedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`sha256` is the hexadecimal digest of the file's content, empty if its writer made none."""

    file: str
    size_bytes: int
    boxes: list[SavedBox]
    sha256: str = ""


class CheckpointIndex(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `index.json`. `dtype` is the parameters'; their states may have another."""

    format: str
    architecture: dict[str, Any]
    dtype: DType
    files: list[SavedFile]
    metadata: dict[str, Any] = {}


class _AnyFormat(msgspec.Struct, frozen=True):
    """An `index.json` of any version."""

    format: str | None = None


class HeaderEntry(msgspec.Struct, frozen=True):
    """The entry of one tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def box_file(rank: int) -> str:
    """Name of the file that `rank` writes."""
    return f"boxes-{rank}.safetensors"


def digest_file(rank: int) -> str:
    """Name of the file that keeps the digest of `box_file(rank)` until it is in the index."""
    return box_file(rank) + ".sha256"


def staging_directory(directory: Path) -> Path:
    """The directory of an unfinished checkpoint: beside the target, so that a rename completes it."""
    return directory.with_name(f".{directory.name}.partial")


def of_kind(box: Box, kind: str) -> Box:
    """The box of a parameter's state, with the same offset and shape: `<name>@exp_avg` for kind `exp_avg`."""
    return Box(f"{box.name}@{kind}", box.offset, box.shape) if kind else box


def optimizer_kinds(dtype: DType) -> tuple[str, ...]:
    """AdamW's states for each parameter of `dtype`: two moments, and below float32 a master copy."""
    return ("exp_avg", "exp_avg_sq", "master") if dtype == "bfloat16" else ("exp_avg", "exp_avg_sq")


def newer_kinds(versions: int) -> tuple[str, ...]:
    """The versions of its parameters that a model keeps besides the oldest one, the newest last."""
    return tuple(f"newer_{i}" for i in range(1, versions))


def state_owners(
    model: DecoderConfig,
    layout: Layout,
    dtype: DType,
    data_parallel: DataParallel = "zero1",
    *,
    with_optimizer: bool = True,
    versions: int = 1,
) -> dict[int, list[Box]]:
    """By device, the boxes of a model that it writes, with versions and optimizer states: the counted part of its
    shard.

    Every element of every parameter, and of its states, is written once (`counted_range`).
    """
    kinds = ("", *newer_kinds(versions), *(optimizer_kinds(dtype) if with_optimizer else ()))
    return {
        device: [
            of_kind(box, kind)
            for box, _ in shard_boxes(model, layout, device, data_parallel, only_counted=True)
            for kind in kinds
        ]
        for device in layout.mesh.devices
    }


def file_keys(boxes: Sequence[Box]) -> list[str]:
    """The key of every box in one file: its name, with its offset if several boxes have the name."""
    count = Counter(box.name for box in boxes)
    return [box.name if count[box.name] == 1 else f"{box.name}#{','.join(map(str, box.offset))}" for box in boxes]


def finish(
    directory: Path | str,
    model: DecoderConfig,
    dtype: DType,
    owners: Mapping[int, Sequence[Box]],
    metadata: Mapping[str, Any] | None = None,
) -> CheckpointIndex:
    """Completes the checkpoint `directory` after every owner has written its boxes; replaces an older one.

    `metadata` is any JSON: step, seed, position in the data.

    Raises:
        ValueError: the owners do not cover every parameter of the model exactly once.
        UserError: a file is missing, truncated or holds other boxes; the target stays as it was.
    """
    directory = Path(directory)
    _check_cover(model, owners)
    staging = staging_directory(directory)
    files = []
    for rank, boxes in sorted(owners.items()):
        if boxes:
            size_bytes = _check_file(staging / box_file(rank), boxes, SAFETENSORS_DTYPE[dtype])
            saved = [
                SavedBox(name=box.name, offset=box.offset, shape=box.shape, key="" if key == box.name else key)
                for box, key in zip(boxes, file_keys(boxes), strict=True)
            ]
            digest = staging / digest_file(rank)
            sha256 = read_text(digest).strip() if digest.is_file() else ""
            files.append(SavedFile(file=box_file(rank), size_bytes=size_bytes, boxes=saved, sha256=sha256))
    index = CheckpointIndex(
        format=FORMAT, architecture=asdict(model), dtype=dtype, files=files, metadata=dict(metadata or {})
    )
    for stale in {path.name for path in staging.iterdir()} - {saved_file.file for saved_file in files}:
        (staging / stale).unlink()  # left by an interrupted attempt
    write_atomically(staging / INDEX_FILE, msgspec.json.format(msgspec.json.encode(index)))
    _replace(staging, directory)
    return index


def read_index(directory: Path | str) -> CheckpointIndex:
    """The index of a checkpoint, after checking that all its files are there with the right sizes.

    Raises:
        UserError: there is no checkpoint, or it is incomplete, damaged, or of another format.
    """
    directory = present(Path(directory))
    path = directory / INDEX_FILE
    if not path.is_file():
        reason = "has no index.json: it is no complete checkpoint" if directory.is_dir() else "does not exist"
        raise UserError(f"checkpoint {directory} {reason}; name the directory that a finished save made")
    try:
        content = read_bytes(path)
        if (found := decode_json(content, _AnyFormat).format) != FORMAT:
            raise UserError(f"{path} has format {found!r}, this version reads {FORMAT!r}; convert or save it again")
        index = decode_json(content, CheckpointIndex)
    except (BadContentError, OSError) as error:
        raise UserError(f"{path} is damaged ({error}); use another checkpoint") from None
    for saved_file in index.files:
        for box in saved_file.boxes:
            if len(box.offset) != len(box.shape) or min((*box.offset, *box.shape), default=0) < 0:
                raise UserError(
                    f"{path} is damaged ({box.name} has offset {list(box.offset)} and shape {list(box.shape)}); use "
                    "another checkpoint"
                )
        check_plain_name(path, saved_file.file)
        _check_size(directory / saved_file.file, saved_file.size_bytes)
    return index


def check_plain_name(index: Path, file: str) -> None:
    """Raises UserError where the file that an index names may lie outside the index's folder."""
    if Path(file).name != file:
        raise UserError(f"{index} names the file {file!r}, which is not a plain name; use another checkpoint")


def check_content(directory: Path, index: CheckpointIndex) -> None:
    """Reads all files of the checkpoint whose digest is in its index.

    Raises:
        UserError: naming a file that has other content, or cannot be read.
    """

    def check(saved: SavedFile) -> None:
        path = directory / saved.file
        try:
            found = file_digest(path)
        except OSError as error:
            raise UserError(f"checkpoint file {path} cannot be read ({error}); use another checkpoint") from error
        if found != saved.sha256:
            raise UserError(
                f"checkpoint file {path} has other content than when it was saved (sha256 {found}, not "
                f"{saved.sha256}); restore it or use another checkpoint"
            )

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(check, (saved for saved in index.files if saved.sha256)))


def optimizer_steps(index: CheckpointIndex, directory: Path | str) -> int:
    """How many optimizer steps had been made when a checkpoint with optimizer states was saved.

    Raises:
        UserError: it holds none.
    """
    steps = index.metadata.get(STEPS_KEY)
    if not isinstance(steps, int) or not any("@" in box.name for file in index.files for box in file.boxes):
        raise UserError(
            f"checkpoint {directory} holds no optimizer states; start from its parameters, or choose a "
            "checkpoint that was saved with them"
        )
    return steps


def initial_optimizer_steps(setup: ModelSetup) -> int:
    """How many optimizer steps a model starts with. Raises UserError if its checkpoint has no optimizer states."""
    if not setup.with_optimizer or setup.checkpoint is None:
        return 0
    return optimizer_steps(read_index(setup.checkpoint), setup.checkpoint)


def check_architecture(
    index: CheckpointIndex, directory: Path, model: DecoderConfig, ignore_head: bool = False
) -> None:
    """Raises UserError if the checkpoint is of another architecture than `model`.

    `ignore_head` allows another head on the same trunk: a reward model that starts from a language model.
    """
    ignored = {f.name for f in fields(model) if not f.compare}
    ignored |= {"head", "tied_embeddings"} if ignore_head else set()
    wanted = msgspec.json.decode(msgspec.json.encode(model))
    # A field that a checkpoint lacks was added after it was saved, when every model had the field's default.
    defaults = {f.name: f.default for f in fields(model) if f.default is not MISSING}
    saved = msgspec.json.decode(msgspec.json.encode(defaults)) | index.architecture
    differing = [
        f"{name}={saved.get(name)!r} (the model has {wanted.get(name)!r})"
        for name in {**wanted, **saved}
        if name not in ignored and saved.get(name) != wanted.get(name)
    ]
    if differing:
        raise UserError(
            f"checkpoint {directory} is of another architecture: {', '.join(differing)}; "
            f"load it into a model of its own architecture or choose another checkpoint"
        )


def _check_cover(model: DecoderConfig, owners: Mapping[int, Sequence[Box]]) -> None:
    """Each parameter, and each of its states, must be owned as a whole: by disjoint boxes of its full size."""
    shapes = {spec.name: spec.shape for spec in decoder_parameters(model)}
    by_name: dict[str, list[Box]] = {name: [] for name in shapes}
    for boxes in owners.values():
        for box in boxes:
            if box.name.partition("@")[0] not in shapes:
                raise ValueError(f"{box.name} is no parameter of the model; own the boxes of this architecture")
            by_name.setdefault(box.name, []).append(box)
    for name, boxes in by_name.items():
        whole = Box(name, (0,) * len(shapes[name.partition("@")[0]]), shapes[name.partition("@")[0]])
        is_disjoint = not any(a.intersect(b) for i, a in enumerate(boxes) for b in boxes[:i])
        is_inside = all(whole.intersect(box) == box for box in boxes)
        if not (is_disjoint and is_inside and sum(box.size for box in boxes) == whole.size):
            raise ValueError(f"the owners do not cover {name} of shape {whole.shape} exactly once; boxes: {boxes}")


def read_header(path: Path) -> dict[str, HeaderEntry]:
    """The header of a safetensors file, after checking the length of the file.

    The format: 8 bytes little-endian length n, n bytes of JSON {key: {dtype, shape, data_offsets}}, the data.

    Raises:
        UserError: the file is missing, truncated or no safetensors file, or tensors overlap or leave gaps.
    """
    _check_size(path, None)
    size_bytes = path.stat().st_size
    with open_regular(path) as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        is_there = header_bytes <= min(size_bytes - 8, _MAX_HEADER_BYTES)
        try:
            header = _decode_header(file.read(header_bytes) if is_there else b"")
        except BadContentError as error:
            raise UserError(
                f"checkpoint file {path} is truncated or no safetensors file ({error}); save or copy the checkpoint "
                "again"
            ) from None
    _check_size(path, 8 + header_bytes + max((entry.data_offsets[1] for entry in header.values()), default=0))
    _check_places(path, header)
    return header


def _check_places(path: Path, header: Mapping[str, HeaderEntry]) -> None:
    """Raises UserError if a tensor's length is not that of its shape, or the tensors overlap or leave gaps."""
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1].data_offsets):
        item = ITEM_BYTES.get(entry.dtype)
        start, stop = entry.data_offsets
        is_shape = len(entry.shape) <= _MAX_DIMENSIONS and min(entry.shape, default=0) >= 0
        if start != end or stop < start or not is_shape or (item and stop - start != item * math.prod(entry.shape)):
            raise UserError(
                f"checkpoint file {path} is damaged ({name}, {entry.dtype} of shape {list(entry.shape)}, has the bytes "
                f"from {start} to {stop}, where {end} are before it); restore it or use another checkpoint"
            )
        end = stop


def _check_file(path: Path, boxes: Sequence[Box], parameter_dtype: str) -> int:
    """Size in bytes of the safetensors file, which holds exactly `boxes` according to its own header."""
    header = read_header(path)
    found = {name: entry.shape for name, entry in header.items()}
    wanted = {key: box.shape for key, box in zip(file_keys(boxes), boxes, strict=True)}
    if found != wanted:
        differing = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        raise UserError(
            f"checkpoint file {path} holds other boxes than its owner should write: {differing[0]} has shape "
            f"{found.get(differing[0])}, not {wanted.get(differing[0])}; save the checkpoint again"
        )
    for name, entry in header.items():
        if "@" not in name and entry.dtype != parameter_dtype:
            raise UserError(f"checkpoint file {path}: {name} is {entry.dtype}, not {parameter_dtype}; save it again")
    return path.stat().st_size


def _decode_header(content: bytes) -> dict[str, HeaderEntry]:
    raw = decode_json(content, dict[str, msgspec.Raw])
    raw.pop("__metadata__", None)
    return {name: decode_json(bytes(entry), HeaderEntry) for name, entry in raw.items()}


def _check_size(path: Path, size_bytes: int | None) -> None:
    if not os.path.isfile(path):  # unlike the method it is False for a name that cannot be
        raise UserError(f"checkpoint file {path} is missing; restore it or use another checkpoint")
    found = path.stat().st_size
    if size_bytes is not None and found != size_bytes:
        raise UserError(
            f"checkpoint file {path} has {found} bytes, not {size_bytes}: it is truncated or was changed; "
            f"restore it or use another checkpoint"
        )


def present(directory: Path) -> Path:
    """Where the checkpoint of a name is: there, or moved aside where a process that replaced it died in between."""
    old = _moved_aside(directory)
    return old if old.exists() and not directory.exists() else directory


def _moved_aside(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.old")


@contextmanager
def staged(directory: Path, companions: Iterable[Path]) -> Iterator[Path]:
    """A folder to write files into. It gets copies of `companions`, and then takes the place of `directory`."""
    staging = staging_directory(directory)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    yield staging
    for path in companions:
        shutil.copyfile(path, staging / path.name)
    _replace(staging, directory)


def _replace(staging: Path, directory: Path) -> None:
    """Renames `staging` to `directory`; a directory already there is moved aside first, then removed.

    At every moment one of the two has a complete checkpoint (`present`).
    """
    old = _moved_aside(directory)
    if directory.exists():
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
    staging.rename(directory)
    sync_directory(directory.parent)
    shutil.rmtree(old, ignore_errors=True)
