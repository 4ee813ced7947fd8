from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(autouse=True)
def _no_profiles(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans count with the descriptions, whatever was measured in the checkout (`realhf profile`, `make real`), or by
    other tests of this process."""
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("XDG_DATA_HOME", str(elsewhere / "data"))
