"""memory: what 50 further calls of training and generation take from the device, after the same calls once."""

import torch

from tests.simulated.programs.common import LARGE, end, generate, groups_of, layout_of, model_in, say, train

CALLS, MIB = 50, 2**20
model = model_in(groups_of(layout_of(1, 1, 1)), LARGE)
LENGTHS, ROWS = (72, 40, 48, 56, 64), (8, 2, 3, 4, 5, 6, 7)  # the largest first: kept graphs need not grow later


def call(number: int) -> None:
    """A step and rollouts of other sizes than the last ones, which take the memory that these have freed."""
    train(model, length=LENGTHS[number % len(LENGTHS)])
    generate(model, "kept", samples=ROWS[number % len(ROWS)])


for number in range(len(LENGTHS) * len(ROWS)):  # every pair of sizes
    call(number)
torch.cuda.synchronize()
allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
for number in range(CALLS):
    call(number)
torch.cuda.synchronize()
say(f"bytes more after {CALLS} calls: {torch.cuda.memory_allocated() - allocated}")
say(f"reserved bytes more after {CALLS} calls: {torch.cuda.memory_reserved() - reserved}")
say(f"peak of allocated MiB: {torch.cuda.max_memory_allocated() / MIB:.2f}")
say(f"reserved MiB: {torch.cuda.memory_reserved() / MIB:.2f}")
say(f"expandable segments: {sum(segment['is_expandable'] for segment in torch.cuda.memory_snapshot())}")
end()
