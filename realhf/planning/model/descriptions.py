"""Where descriptions of hardware are read from: the package, files of the user, and beside profiles."""

from pathlib import Path

import msgspec

from realhf.base.errors import UserError
from realhf.base.files import decode_yaml, read_file, write_atomically
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.profile import profiles_root

DESCRIPTIONS = Path(__file__).parents[1] / "descriptions"  # NAME.yaml each, part of the package
LEFT_FILE = "hardware.yaml"  # beside profiles
YAML_SUFFIXES = (".yaml", ".yml")


def load_hardware(name: str) -> Hardware:
    """The description that `--hardware NAME` means: a file (with a "/" or .yaml), one of the package, or one that
    `realhf profile` has left beside profiles. Raises UserError if there is none, and as `read_hardware`."""
    if "/" in name or name.endswith(YAML_SUFFIXES):
        return read_hardware(Path(name))
    found = left_descriptions() | {path.stem: path for path in DESCRIPTIONS.glob("*.yaml")}
    if name not in found:
        known = ", ".join(sorted(found))
        raise UserError(f"hardware={name!r} is not known; choose one of {known}, or give the path of a .yaml file")
    return read_hardware(found[name])


def read_hardware(path: Path) -> Hardware:
    """The description in a file. Raises UserError if it cannot be read, or a field is missing, unknown or ill-typed."""
    remedy = f"copy one of {DESCRIPTIONS} there; profiles/README.md lists the fields"
    return read_file(path, lambda data: decode_yaml(data, Hardware, strict=False), "hardware description", remedy)


def presets() -> list[Hardware]:
    """The descriptions of the package, by name."""
    return [read_hardware(path) for path in sorted(DESCRIPTIONS.glob("*.yaml"))]


def leave_description(hardware: Hardware, root: Path | None = None) -> None:
    """Writes a description beside the profiles of that hardware, so that another machine can plan for it by name; none
    where the package has one of that name."""
    if (DESCRIPTIONS / f"{hardware.name}.yaml").exists():
        return
    folder = (root or profiles_root()) / hardware.name
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / LEFT_FILE, msgspec.yaml.encode(hardware))


def left_descriptions() -> dict[str, Path]:
    """The descriptions that lie beside profiles, by the name of their folder."""
    return {path.parent.name: path for path in sorted(profiles_root().glob(f"*/{LEFT_FILE}"))}
