"""turns: as PPO does, a model trains and another generates, and the one that does not compute waits in host memory.

Qwen2.5-1.5B with AdamW's states trains; then come parameters of 14 GiB and 38 GiB of keys and values.
"""

import random

import torch
from torch import Tensor

from realhf.architecture.compute import Computation
from realhf.architecture.model import DecoderConfig
from realhf.engine.residency.offload import HostCopy
from tests.simulated.programs.common import end, groups_of, layout_of, model_in, say, train

GIB, STEPS, SAMPLES = 2**30, 6, 80
QWEN = DecoderConfig(
    hidden_size=1536, intermediate_size=8960, num_layers=28, num_heads=12, num_kv_heads=2, vocab_size=151936,
    tied_embeddings=True, qkv_bias=True,
)  # fmt: skip


def taken(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device="cuda")


random.seed(0)
model = model_in(groups_of(layout_of(1, 1, 1)), QWEN, compute=Computation(recomputation="full"))
other = HostCopy([taken(int(14.2 * GIB))])
samples: list[Tensor] = []  # they live longer than the calls that make them
for _ in range(STEPS):
    other.offload()
    train(model, samples=8, length=1024, micro_batches=1)
    model.residency.offload()
    other.load()
    cache = [taken(19 * GIB) for _ in range(2)]
    samples += [taken(random.randrange(2**12, 2**22)) for _ in range(SAMPLES // 2)]
    del cache, samples[:-SAMPLES]
    other.offload()
    model.residency.load()
    torch.cuda.synchronize()
    say(f"reserved GiB: {torch.cuda.memory_reserved() / GIB:.2f}")
say(f"most GiB in use: {torch.cuda.max_memory_allocated() / GIB:.2f}")
end()
