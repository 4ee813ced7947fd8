"""Accounts and QOS, where SLURM keeps them: a private cluster with slurmdbd."""

import getpass
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.cluster import ACCOUNTING_PACKAGES, Testbed, missing_programs
from testbed.configuration import TestbedShape

from realhf.base.errors import UserError
from realhf.launch.slurm.launcher import SlurmLauncher
from realhf.launch.slurm.script import SlurmOptions
from realhf.rundir.paths import RunDirectory
from tests.slurm.test_ordinary_days import FOR_EVER, job, refusal

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture
def accounting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Testbed]:
    """A user of the account lab, with the QOS normal and short (ten minutes); there is another one, high."""
    if missing := missing_programs(with_accounting=True):
        pytest.skip(f"not found: {', '.join(missing)}; apt-get install {ACCOUNTING_PACKAGES}")
    with tempfile.TemporaryDirectory(prefix="slurm_") as folder:
        Path(folder).chmod(0o755)
        cluster = Testbed(Path(folder) / "testbed")
        cluster.up(TestbedShape(nodes=2, cpus=8, gpus=2, with_accounting=True))
        monkeypatch.setenv("SLURM_CONF", str(cluster.slurm_conf))
        user = getpass.getuser()
        try:
            for words in (
                "add account lab",
                f"add user {user} account=lab",
                "add qos high",
                "add qos short maxwall=10",
                f"modify user {user} set qos=normal,short defaultqos=normal",
                f"modify user {user} set defaultaccount=lab",
            ):
                cluster.run("sacctmgr", "-i", *words.split())
            yield cluster
        finally:
            cluster.down()


def test_accounts_and_qos_are_named(accounting: Testbed, tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run")

    def launcher(**options: object) -> SlurmLauncher:
        return SlurmLauncher(SlurmOptions(**({"poll_interval_s": 0.2} | options)))  # type: ignore[arg-type]

    for options, says in (
        ({"account": "nobody"}, "--account nobody: yours are lab"),
        ({"sbatch": ("--qos=high",)}, "--sbatch=--qos=high: yours are normal, short"),
        ({"sbatch": ("--qos=short",), "time_limit": "60"}, "--time-limit 60: QOS short allows 00:10:00"),
    ):
        with pytest.raises(UserError, match=says):
            launcher(**options).check()
        said = refusal(launcher(**options), job(directory, FOR_EVER))
        assert said.startswith("SLURM refused the job: ")
        assert said.splitlines()[1].startswith(says)
    assert accounting.run("squeue", "-h").stdout == ""
    good = launcher(account="lab", sbatch=("--qos=short",), time_limit="5")
    good.check()
    good.start(job(directory))
    good.stop()
