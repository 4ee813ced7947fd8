"""checkpoints FOLDER: a model under tensor parallelism is saved and read again.

Its tensors are smaller than 64 KiB, up to which the simulator copies whole, so values come back.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from realhf.architecture.model import DecoderConfig
from realhf.models.checkpoint import CheckpointReader, snapshot, write_snapshot
from realhf.models.checkpoint_index import STEPS_KEY, finish, state_owners
from tests.simulated.programs.common import RANK, end, groups_of, layout_of, model_in, say, train

TINY = DecoderConfig(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=64)
directory, layout = Path(sys.argv[1]), layout_of(1, 2, 1)
groups = groups_of(layout)
model = model_in(groups, TINY, torch.bfloat16)
train(model)
model.initialise(seed=3)
write_snapshot(directory, RANK, snapshot(model.state()), hashed=True)
dist.barrier()
if RANK == 0:
    finish(directory, TINY, "bfloat16", state_owners(TINY, layout, "bfloat16"), {STEPS_KEY: model.optimizer_steps})
dist.barrier()
other = model_in(groups, TINY, torch.bfloat16)
reader = CheckpointReader(directory)
reader.check_content()
other.load_state(reader)
torch.cuda.synchronize()
pairs = list(zip(model.state(), other.state(), strict=True))
different = [box.name for (box, ours), (_, theirs) in pairs if not torch.equal(ours.cpu(), theirs.cpu())]
say(f"tensors: {len(pairs)}")
say(f"tensors that are not zero: {sum(bool(ours.cpu().count_nonzero()) for (_, ours), _ in pairs)}")
say(f"tensors that differ: {len(different)}")
train(other)
end()
