"""offload: parameters and optimizer states go to pinned host memory and come back, again and again."""

import torch

from realhf.engine.residency.offload import HostCopy
from tests.simulated.programs.common import end, groups_of, layout_of, model_in, say, train

model = model_in(groups_of(layout_of(1, 1, 1)))
assert model.trainer is not None
vectors = [model.parameters.flat, model.parameters.gradient, *model.trainer.optimizer.on_device()]
size_bytes = sum(vector.nbytes for vector in vectors)
on_host_bytes = size_bytes - model.parameters.gradient.nbytes  # the values of the gradient are not kept


def pinned_bytes() -> int:
    return int(torch.cuda.memory.host_memory_stats()["allocated_bytes.current"])


train(model)
train(model)
torch.cuda.synchronize()
here, pinned = torch.cuda.memory_allocated(), pinned_bytes()
for _ in range(5):
    model.residency.offload()
    torch.cuda.synchronize()
    say(f"device bytes given back beyond the vectors: {here - torch.cuda.memory_allocated() - size_bytes}")
    say(f"pinned bytes by those of the vectors: {(pinned_bytes() - pinned) / on_host_bytes:.4f}")
    model.residency.load()
    train(model)
    torch.cuda.synchronize()
    say(f"device bytes more than before: {torch.cuda.memory_allocated() - here}")

# Copies of at most 64 KiB move all of their bytes, so a model of small vectors keeps its values.
values = [torch.arange(1000.0), torch.arange(4096).bfloat16()]
there = [value.to("cuda") for value in values]
copy = HostCopy(there)
for _ in range(2):
    copy.offload()
    others = [torch.full_like(value, 7.0).to("cuda") for value in values]  # in the memory that was given back
    copy.load()
    del others
say(f"vectors with their values: {sum(map(torch.equal, values, [vector.cpu() for vector in there]))}")
end()
