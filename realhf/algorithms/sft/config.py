"""The loss of supervised fine-tuning."""

from realhf.api.script.functions import loss_function

sft_loss = loss_function("realhf.algorithms.sft.functions:sft")
"""`sft_loss()` is the cross entropy of answers; PPO-ptx has it as a further loss beside the policy's."""
