"""Which pages of the KV cache are in use, and by how many sequences."""


class PagePool:
    """Pages 0, 1, ... `size` - 1. A page is taken by one sequence, may be shared with others, and is free when the last
    of them has returned it."""

    def __init__(self, size: int):
        self.size = size
        self._free = list(reversed(range(size)))  # the last one is taken first
        self._holders = [0] * size

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def share(self, page: int) -> None:
        assert self._holders[page], f"page {page} is free"
        self._holders[page] += 1

    def give_back(self, page: int) -> None:
        assert self._holders[page], f"page {page} is free"
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free.append(page)
