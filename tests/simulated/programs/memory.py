"""memory: what 50 further calls of training and generation take from the device, after the same calls once."""

import torch

from tests.simulated.programs.common import end, generate, groups_of, layout_of, model_in, say, train

CALLS, MIB = 50, 2**20
model = model_in(groups_of(layout_of(1, 1, 1)))


def call(number: int) -> None:
    """Steps and rollouts of changing sizes, whose freed memory later ones take."""
    train(model, length=40 + 8 * (number % 5))
    generate(model, "kept", samples=2 + number % 7)


for number in range(35):  # every pair of sizes
    call(number)
torch.cuda.synchronize()
before = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
for number in range(CALLS):
    call(number)
torch.cuda.synchronize()
say(f"bytes more after {CALLS} calls: {torch.cuda.memory_allocated() - before}")
say(f"peak of allocated MiB: {torch.cuda.max_memory_allocated() / MIB:.2f}")
say(f"reserved MiB: {torch.cuda.memory_reserved() / MIB:.2f}")
segments = torch.cuda.memory_snapshot()
say(f"expandable segments: {sum(segment['is_expandable'] for segment in segments)}")
end()
