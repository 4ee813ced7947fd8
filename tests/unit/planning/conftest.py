from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(autouse=True)
def _no_profiles_of_the_checkout(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans count with the descriptions, whatever was measured in the checkout (`realhf profile`, `make real`)."""
    monkeypatch.chdir(elsewhere)
