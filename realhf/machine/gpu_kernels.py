"""The kernels for GPUs that a run can do without: how to have them, and the switch that leaves them out."""

import os
from collections.abc import Mapping

from realhf.base.errors import UserError

# By the words of the switch: what installs each of them.
REMEDIES = {
    "triton": "pip install 'realhf[gpu]'",
    "flash-attn": "pip install --no-build-isolation 'realhf[flash-attn]'",
    "varlen": "pip install 'torch>=2.11'",
}
WITHOUT = "REALHF_WITHOUT"


def left_out(environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    """The kernels that the user leaves out: `REALHF_WITHOUT=triton,flash-attn`. Raises UserError for unknown ones."""
    words = frozenset(word.strip() for word in environment.get(WITHOUT, "").split(",")) - {""}
    if unknown := sorted(words - REMEDIES.keys()):
        raise UserError(f"{WITHOUT}: {', '.join(unknown)} is not known; choose from {', '.join(REMEDIES)}")
    return words
