"""in_order DP TP PP: generation with each life of decode graphs, and two training steps; sums have one order."""

import sys

from realhf.architecture.compute import Computation
from tests.simulated.programs.common import end, generate, groups_of, layout_of, model_in, say, train

dp, tp, pp = map(int, sys.argv[1:])
model = model_in(groups_of(layout_of(dp, tp, pp)), compute=Computation(reproducible="layout"))
for graphs in ("off", "call", "kept"):
    generate(model, graphs)
    say(f"generated with decode graphs {graphs}")
for step in range(2):
    train(model, parts=4)
    say(f"trained in step {step}")
end()
