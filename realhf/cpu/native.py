"""The compiled kernels of this package (`csrc/kernels`), which may not be built, and their names of torch's dtypes."""

import importlib
from typing import Any

import torch

kernels: Any
try:
    kernels = importlib.import_module("realhf.cpu._cpu")
except ImportError:  # not built
    kernels = None

DTYPES: dict[torch.dtype, Any] = (
    {} if kernels is None else {torch.float32: kernels.DType.float32, torch.bfloat16: kernels.DType.bfloat16}
)
