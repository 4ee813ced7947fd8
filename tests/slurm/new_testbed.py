"""A SLURM of virtual nodes for the time of a test, or of several."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.cluster import Testbed
from testbed.configuration import TestbedShape


@contextlib.contextmanager
def new_testbed(*, tells_of_preemption: bool = True) -> Iterator[Testbed]:
    """A cluster of two virtual nodes that is gone afterwards, for tests that would spoil it for others, or that need
    another one."""
    with tempfile.TemporaryDirectory(prefix="slurm_") as folder, pytest.MonkeyPatch.context() as environment:
        Path(folder).chmod(0o755)  # munge wants its socket within everyone's reach
        cluster = Testbed(Path(folder) / "testbed")
        cluster.up(TestbedShape(nodes=2, cpus=8, gpus=2, tells_of_preemption=tells_of_preemption))
        environment.setenv("SLURM_CONF", str(cluster.slurm_conf))
        try:
            yield cluster
        finally:
            cluster.down()
