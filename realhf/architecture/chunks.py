"""Sizes of pieces that the engine computes at a time. The engine follows them, and the planner counts on them."""

# Prompts are computed in steps of at most so many tokens, or of one longer prompt: enough for full speed, and
# activations stay small.
PREFILL_TOKENS = 4096

# On a CPU an inference or a training computes once what neighbours begin with alike, if it is at least so many tokens:
# a shorter prefix saves less than attention's calls for more shapes take.
SHORTEST_SHARED = 8

# Elements of a vector on a GPU whose optimizer states are updated at a time: enough for its rate, and they bound what
# is brought from the host at once.
OPTIMIZER_ELEMENTS = 2**26

# The logits of a tile on a CPU: they stay in or near a core's cache, and are still enough for efficient products.
LOGITS_BYTES = 4 << 20

# Shared memory for the messages from one rank to another of its host; untouched pages take none. What does not fit
# waits until the sender sends or waits again, since a rank that computes serves no messages.
RING_BYTES = 2**24
