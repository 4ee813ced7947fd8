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

# Shared memory for the messages from one rank to another of its host; untouched pages take none. Messages that do not
# fit wait until the sender sends or waits again, since a rank that computes serves no messages.
RING_BYTES = 2**24
