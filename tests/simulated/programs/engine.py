"""engine DP TP PP: two training steps, and a generation with each life of decode graphs, in one layout.

At last one of sequences that are so long that their keys are split among programs.
"""

import sys

from tests.simulated.programs.common import end, generate, groups_of, layout_of, model_in, say, train

dp, tp, pp = map(int, sys.argv[1:])
model = model_in(groups_of(layout_of(dp, tp, pp)))
for step in range(2):
    train(model)
    say(f"trained in step {step}")
for graphs in ("off", "call", "kept"):
    generate(model, graphs)
    say(f"generated with decode graphs {graphs}")
generate(model, "kept", prompt_tokens=600)
say("generated behind long prompts")
end()
