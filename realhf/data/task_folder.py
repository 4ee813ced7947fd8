"""The folder of a miniature task: it appears complete or not at all, and its manifest says how it was made."""

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from realhf.base.errors import UserError
from realhf.base.files import BadContentError, decode_loose_json, read_bytes

MANIFEST = "manifest.json"


def task_manifest(task: str, version: int, seed: int, sizes: Mapping[str, int]) -> dict[str, object]:
    """The manifest in a folder. `version` rises when the same seed gives other files than before."""
    return {"task": task, "format_version": version, "seed": seed, "sizes": dict(sizes)}


def ensure_folder(data_dir: str | Path, manifest: Mapping[str, object], write: Callable[[Path], None]) -> Path:
    """Has `write` make the files in a new folder, unless they are there already; returns the folder.

    The folder appears complete or not at all, also when several processes make it at once.

    Raises:
        UserError: the folder holds something else, or the data of another manifest.
    """
    target = Path(data_dir)
    if target.is_dir() and any(target.iterdir()):
        _check_same(target, manifest)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write(work)
        (work / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        work.chmod(0o755)
        try:
            work.rename(target)
        except OSError:  # another process was faster
            _check_same(target, manifest)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def make_by_command(
    module: str, example: str, ensure: Callable[[str, int], Path], described: Callable[[Path], str]
) -> None:
    """`python -m MODULE DIR --seed N`: makes a task's data and lists its files."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description="Makes the data of a miniature task; does nothing where it is there already.",
        epilog=f"example: python -m {module} {example} --seed 0",
    )
    parser.add_argument("data_dir")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        print(described(ensure(arguments.data_dir, arguments.seed)))
    except UserError as error:
        parser.exit(2, f"{error}\n")


def _check_same(target: Path, manifest: Mapping[str, object]) -> None:
    try:
        found = decode_loose_json(read_bytes(target / MANIFEST))
    except (OSError, BadContentError):
        found = None
    task = manifest["task"]
    version = {"format_version": manifest["format_version"]}
    if isinstance(found, dict) and {**found, **version} == manifest != found:
        raise UserError(
            f"{target} holds the data of the task {task!r} as another version of realhf made it; remove the folder, "
            "and it is made anew"
        )
    if found != manifest:
        what = f"the data of {found}" if found else "other files"
        raise UserError(
            f"{target} holds {what}, not the data of the task {task!r} of seed {manifest['seed']}; name another folder "
            "or remove this one"
        )
