"""The block manager of the KV cache: which blocks, here called pages, are in use, and by how many sequences."""


class BlockManager:
    """Pages 0, 1, ... `size` - 1. One sequence allocates a page, others may share it; it is free when the last of them
    has released it."""

    def __init__(self, size: int):
        self.size = size
        self._free = list(reversed(range(size)))  # the last one is allocated first
        self._holders = [0] * size

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        assert self._holders[page], f"page {page} is free"
        self._holders[page] += 1

    def release(self, page: int) -> None:
        assert self._holders[page], f"page {page} is free"
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free.append(page)
