"""Python imports this at its start: a worker gets stand-ins for kernels, and other processes do not import torch."""

import os

from realhf.launch.process import WORKER_INDEX_VARIABLE

if WORKER_INDEX_VARIABLE in os.environ:
    from tests.simulated.programs import stand_ins

    stand_ins.install()
