"""Where descriptions of hardware are read from: the package, a file, and beside profiles."""

import re
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from realhf.base.errors import UserError
from realhf.planning.model import descriptions
from realhf.planning.model.descriptions import (
    DESCRIPTIONS,
    leave_description,
    left_descriptions,
    load_hardware,
    presets,
    read_hardware,
)

CPU = load_hardware("cpu")
MINE = structs.replace(CPU, name="mine", sampling_s=0.25)


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine's folder of profiles."""
    monkeypatch.setattr(descriptions, "profiles_root", lambda: tmp_path / "profiles")
    return tmp_path / "profiles"


def test_a_description_that_was_left_is_found_by_its_name(profiles: Path) -> None:
    assert left_descriptions() == {}
    leave_description(MINE)
    assert left_descriptions() == {"mine": profiles / "mine" / "hardware.yaml"}
    assert load_hardware("mine") == MINE
    leave_description(structs.replace(MINE, sampling_s=0.5))
    assert load_hardware("mine").sampling_s == 0.5


def test_descriptions_beside_profiles_are_in_the_order_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Root:
        """A folder of a file system that has an order of its own."""

        def glob(self, pattern: str) -> list[Path]:
            return [Path(pattern.replace("*", name)) for name in ("b", "c", "a")]

    monkeypatch.setattr(descriptions, "profiles_root", Root)
    assert list(left_descriptions()) == ["a", "b", "c"]


def test_a_description_is_left_where_it_is_asked_for(profiles: Path, tmp_path: Path) -> None:
    leave_description(MINE, tmp_path / "elsewhere")
    assert not profiles.exists()
    assert read_hardware(tmp_path / "elsewhere" / "mine" / "hardware.yaml") == MINE


def test_the_package_has_the_word_on_its_own_names(profiles: Path) -> None:
    """None of them is left beside profiles, and a file of such a name there is not read."""
    leave_description(structs.replace(CPU, sampling_s=0.25))
    assert not profiles.exists()
    (profiles / "cpu").mkdir(parents=True)
    (profiles / "cpu" / "hardware.yaml").write_bytes(msgspec.yaml.encode(structs.replace(CPU, sampling_s=0.25)))
    assert load_hardware("cpu") == CPU


@pytest.mark.parametrize("name", ["mine.yaml", "mine.yml", "folder/mine"])
def test_a_name_with_a_slash_or_of_a_yaml_file_is_a_path(
    name: str, profiles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    Path(name).write_bytes(msgspec.yaml.encode(MINE))
    assert load_hardware(name) == MINE


def test_an_unknown_name_is_answered_with_those_that_are_known(profiles: Path) -> None:
    leave_description(MINE)
    names = sorted([*(path.stem for path in DESCRIPTIONS.iterdir() if path.suffix == ".yaml"), "mine"])
    expected = f"hardware='tpu' is not known; choose one of {', '.join(names)}, or give the path of a .yaml file"
    with pytest.raises(UserError, match=re.escape(expected)):
        load_hardware("tpu")


def test_presets_are_those_of_the_package_by_name(profiles: Path) -> None:
    leave_description(MINE)
    names = [hardware.name for hardware in presets()]
    assert names == sorted(names, key=lambda name: f"{name}.yaml")
    assert {"a100-80g", "cpu", "h100", "h100-modern", "h200"} <= set(names)
    assert "mine" not in names
    assert all(load_hardware(hardware.name) == hardware for hardware in presets())


def test_a_broken_description_is_answered_with_where_to_find_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    with pytest.raises(UserError, match="cannot read the hardware description"):
        read_hardware(path)
    path.write_text("name: mine\n")
    with pytest.raises(UserError, match=re.escape(f"copy one of {DESCRIPTIONS} there; profiles/README.md lists")):
        read_hardware(path)


def test_numbers_may_be_written_as_yaml_takes_for_text(tmp_path: Path) -> None:
    """YAML 1.1 takes 2.5e9 for text: it has no sign behind the e."""
    path = tmp_path / "mine.yaml"
    text = (DESCRIPTIONS / "cpu.yaml").read_text()
    path.write_text(re.sub(r"\nmemory_bandwidth: \S+", "\nmemory_bandwidth: 2.5e9", text))
    assert read_hardware(path).memory_bandwidth == 2.5e9
