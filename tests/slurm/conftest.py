"""Real SLURMs, brought up once for all tests that ask for one: of virtual nodes, and of hosts of their own."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hosts.cluster import Hosts, why_none
from testbed.cluster import Testbed, missing_programs
from testbed.configuration import TestbedShape

from tests.slurm.new_testbed import new_testbed


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
    with new_testbed() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    """Three hosts of their own beside host0, with a SLURM over them; a test leaves them as they were.

    Where hosts cannot be made the test is skipped, or fails if REALHF_REQUIRE_HOSTS=1.
    """
    missing = missing_programs()
    if why := f"not found: {', '.join(missing)}" if missing else why_none():
        if os.environ.get("REALHF_REQUIRE_HOSTS") == "1":
            pytest.fail(why)
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="hosts_") as folder:
        Path(folder).chmod(0o755)
        made = Hosts(Path(folder) / "hosts")
        made.up(TestbedShape(nodes=3, gpus=0, node_prefix="host", slurmd_timeout_s=30), ends_with_caller=True)
        try:
            yield made
        finally:
            made.down()
