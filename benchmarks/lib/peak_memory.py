"""Counts the bytes of tensors while they live."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from realhf.parallel.views import storage_id


class PeakMemory(TorchDispatchMode):
    """Within it, `peak_bytes` is the most that tensors made by operations had at once, `live_bytes` what they have."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: dict[int, weakref.finalize[..., Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {storage_id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage, key = leaf.untyped_storage(), storage_id(leaf)
                if key not in before and key not in self._known:
                    self._count(storage.nbytes())
                    self._known[key] = weakref.finalize(storage, self._forget, key, storage.nbytes())
        return result

    def _count(self, size_bytes: int) -> None:
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int, size_bytes: int) -> None:
        self.live_bytes -= size_bytes
        del self._known[key]
