"""realhf: plans and runs reinforcement-learning training of language models on a cluster."""

import importlib
from typing import Any

__version__ = "0.1.0"
_LAZY = {"osdp": "realhf.wrapping.osdp", "start": "realhf.live.cluster"}  # these take a while to import


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
