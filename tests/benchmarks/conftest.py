"""The helpers of benchmarks are found as the benchmarks find them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
