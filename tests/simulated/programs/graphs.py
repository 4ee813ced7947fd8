"""graphs: decode graphs that are kept have to grow, go with the parameters, and then leave as much however many."""

import torch

from tests.simulated.programs.common import LARGE, end, generate, groups_of, layout_of, model_in, say

MIB = 2**20
model = model_in(groups_of(layout_of(1, 1, 1)), LARGE)
for rows in (2, 24, 64):  # each has no room in the graphs before
    filling = torch.empty(torch.cuda.mem_get_info()[0] - 32 * MIB, dtype=torch.uint8, device="cuda")
    del filling  # cached, so that a recording has to make room
    generate(model, "kept", samples=rows)
    say(f"graphs of {rows} rows")
model.residency.offload()  # they go with the parameters
model.residency.load()
for rows in (64, 56, 48, 40, 32, 24, 16, 8, 4, 2):
    generate(model, "kept", samples=rows)
    torch.cuda.synchronize()
    say(f"allocated MiB: {torch.cuda.memory_allocated() / MIB:.3f}")
assert model._kept.workspace is not None
(graphs,) = model._kept.workspace._kept.values()
say(f"recorded: {len(graphs._replays)}")
end()
