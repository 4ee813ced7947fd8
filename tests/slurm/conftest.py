"""A real SLURM of two virtual nodes, brought up once for all tests that ask for it."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from testbed.cluster import Testbed, missing_programs
from testbed.configuration import TestbedShape


@pytest.fixture(scope="session")
def slurm_testbed() -> Iterator[Testbed]:
    """The running cluster: node1 and node2, each with 8 cpus and 2 GPUs; SLURM_CONF names it meanwhile.

    Where the packages are not installed the test is skipped, or fails if REALHF_REQUIRE_SLURM=1.
    """
    if missing := missing_programs():
        text = f"not found: {', '.join(missing)}; apt-get install munge slurmctld slurmd slurm-client"
        if os.environ.get("REALHF_REQUIRE_SLURM") == "1":
            pytest.fail(text)
        pytest.skip(text)
    with tempfile.TemporaryDirectory(prefix="slurm_") as folder, pytest.MonkeyPatch.context() as environment:
        Path(folder).chmod(0o755)  # munge wants its socket within everyone's reach
        cluster = Testbed(Path(folder) / "testbed")
        cluster.up(TestbedShape(nodes=2, cpus=8, gpus=2))
        environment.setenv("SLURM_CONF", str(cluster.slurm_conf))
        try:
            yield cluster
        finally:
            cluster.down()
