"""Settings of supervised fine-tuning."""

from dataclasses import dataclass
from typing import ClassVar

from realhf.api.script.functions import loss_function
from realhf.dataflow.interface import InterfaceConfig


@dataclass(frozen=True, kw_only=True)
class SFT(InterfaceConfig):
    """TRAIN_STEP on `tokens` (prompt and answer) and `prompt_length`: cross entropy of the answers' tokens.

    The loss is the mean over the answer tokens of the mini-batch; prompt tokens have no loss. With a further input
    `loss_mask` (`SFTDataset` with loss_on="all") it is the mean over the tokens whose mask is 1.
    Statistics: `loss`, `token_accuracy`, `grad_norm`, `lr`.
    """

    implementation: ClassVar[str] = "realhf.algorithms.sft.interface:SFTInterface"
    sequence_keys: ClassVar[tuple[str, ...]] = ("tokens",)


sft_loss = loss_function("realhf.algorithms.sft.functions:sft")
"""`sft_loss()` is the cross entropy of answers; PPO-ptx has it as a further loss beside the policy's."""
