"""Sizes of pieces that the engine computes at a time. The engine follows them, and the planner counts on them."""

# The most tokens of one prefill step, unless one prompt is longer: enough for full speed, and activations stay small.
PREFILL_TOKENS = 4096

# The shortest common prefix of neighbours, in tokens, that inference and training on a CPU compute once. A shorter
# prefix saves less time than the extra attention calls take.
SHORTEST_SHARED = 8

# Elements of a vector on a GPU whose optimizer states are updated at a time: enough for its full rate.
OPTIMIZER_ELEMENTS = 2**25

# Chunks of so many elements that are on a GPU together where the states wait in host memory: one comes or goes while
# another one is updated. An update is so much shorter than a copy that a third would gain nothing.
STAGED_CHUNKS = 2

# The logits of a tile on a CPU: they stay in or near a core's cache, and are still enough for efficient products.
LOGITS_BYTES = 4 << 20
# The same on a GPU, whose kernels need far more rows and columns at once than a CPU's.
GPU_LOGITS_BYTES = 512 << 20
# Products with fewer rows in a tile of logits are not efficient.
_FEWEST_ROWS = 512

# Shared memory for the messages from one rank to another of its host; untouched pages take none. Messages that do not
# fit wait until the sender sends or waits again, since a rank that computes serves no messages.
RING_BYTES = 2**24


def logits_tile(rows: int, vocab: int, item: int, chunk_bytes: int) -> tuple[int, int]:
    """(rows, columns) of the tiles in which logits [rows, vocab] of `item` bytes each are computed.

    A tile has the whole vocabulary if it still has enough rows then: each tile reads its weight once.
    """
    tile_rows = min(rows, max(chunk_bytes // (vocab * item), _FEWEST_ROWS))
    tile_vocab = min(vocab, max(1, chunk_bytes // (max(1, tile_rows) * item)))
    return max(1, min(tile_rows, chunk_bytes // (tile_vocab * item))), tile_vocab


# Elements of gradients that ranks gather at a time, where their bits must not depend on the layout.
GATHERED_ELEMENTS = 2**20
