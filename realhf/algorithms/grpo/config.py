"""Hyperparameters of GRPO and its relatives: Dr. GRPO, DAPO, GSPO, CISPO, SAPO, LUSPO, VESPO."""

from dataclasses import dataclass
from typing import Annotated

from realhf.algorithms.choices import GRPOLoss, Ratio, RewardScale
from realhf.algorithms.options import COEFFICIENT, ClippedOptions, policy_loss
from realhf.api.script.functions import SEQUENCE_MEAN, TOKEN_MEAN, Reduction, sequence_sum_over, tensor_function
from realhf.base.errors import UserError
from realhf.base.options import Common, Option


@dataclass(frozen=True, kw_only=True)
class GRPO(ClippedOptions):
    """The settings that GRPO's calls share, with the options of rollouts.

    A response's advantage is its reward against the mean of its group, the responses to one prompt. GSPO is
    ratio="sequence", Dr. GRPO is loss_type="dr_grpo" with scale_rewards="none", DAPO is the default loss with
    clip_high=0.28, drop_uniform_groups and mask_truncated.

    `loss_type` is the loss of a token, and how tokens are reduced: "grpo" the mean over each response, then over
    responses; "bnpo" and "dapo" the mean over the tokens of the mini-batch; "dr_grpo" the sum over tokens / (responses
    x max_new_tokens); "luspo" the sum over tokens / responses; "cispo", "vespo" REINFORCE with weighted tokens, mean
    over tokens; "sapo" a smooth gate in place of the clip, reduced as "grpo". What a step lacks of `groups_per_step`,
    later steps make up for.
    """

    samples_per_prompt: int = 8
    loss_type: Annotated[GRPOLoss, Common("loss of a token, and how tokens are reduced")] = "dapo"
    scale_rewards: Annotated[
        RewardScale, Common("deviation that divides a reward's distance from its group's mean")
    ] = "group"
    beta: Annotated[
        float, Common("coefficient of the divergence from the reference (0 needs no reference)", range=COEFFICIENT)
    ] = 0.02
    unbiased_kl: Annotated[
        bool, Option("weight the divergence by the ratio, which makes its gradient unbiased (DeepSeek-V3.2)")
    ] = True
    delta: Annotated[
        float, Option("largest ratio for bad tokens, above 1 + clip_high (INTELLECT-2; 0: any)", range=(0, 1e6))
    ] = 0.0
    ratio: Annotated[Ratio, Common("level of the importance ratio (GSPO: sequence, GSPO-token: sequence_token)")] = (
        "token"
    )
    ratio_cap: Annotated[float, Option("largest ratio of cispo", range=(1, 1e6))] = 5.0
    sapo_temperature_up: Annotated[
        float, Option("sapo: temperature of the gate for good tokens", range=(1e-6, 1e6))
    ] = 1.0
    sapo_temperature_down: Annotated[
        float, Option("sapo: temperature of the gate for bad tokens", range=(1e-6, 1e6))
    ] = 1.05
    vespo_k_up: Annotated[float, Option("vespo: power of the weight of good responses", range=COEFFICIENT)] = 2.0
    vespo_lambda_up: Annotated[float, Option("vespo: decay of the weight of good responses", range=COEFFICIENT)] = 3.0
    vespo_k_down: Annotated[float, Option("vespo: power of the weight of bad responses", range=COEFFICIENT)] = 3.0
    vespo_lambda_down: Annotated[float, Option("vespo: decay of the weight of bad responses", range=COEFFICIENT)] = 2.0
    off_policy_threshold: Annotated[
        float,
        Option(
            "leave out bad responses from which the policy has moved by more than this (DeepSeek-V3.2; 0: off)",
            range=COEFFICIENT,
        ),
    ] = 0.0
    drop_uniform_groups: Annotated[bool, Common("leave out groups whose responses all have one reward")] = False
    groups_per_step: Annotated[
        int, Option("with drop_uniform_groups: train on the first N of the other groups (0: all)", range=(0, 2**20))
    ] = 0

    @property
    def reduction(self) -> Reduction:
        match self.loss_type:
            case "grpo" | "sapo":
                return SEQUENCE_MEAN
            case "dr_grpo":
                return sequence_sum_over(self.max_new_tokens)
            case "luspo":
                return sequence_sum_over(1)
            case _:
                return TOKEN_MEAN

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self.samples_per_prompt, "GRPO")
        if self.delta and self.delta <= 1 + self.clip_high:
            raise UserError(
                f"delta={self.delta} must be above {1 + self.clip_high:g} (1 + clip_high), which clips the ratio of "
                "good tokens; raise it, or set it to 0 for no bound"
            )
        if self.loss_type == "vespo" and self.importance_correction.startswith("sequence"):
            raise UserError(
                f"importance_correction={self.importance_correction!r} does not go with loss_type='vespo', which makes "
                "weights of whole responses itself; choose token_truncate or token_mask"
            )
        if self.groups_per_step and not self.drop_uniform_groups:
            raise UserError(
                f"groups_per_step={self.groups_per_step} takes the first groups that are not uniform; set "
                "drop_uniform_groups too, or leave it at 0"
            )


def check_groups(samples_per_prompt: int, algorithm: str) -> None:
    """Raises UserError unless a group has several responses."""
    if samples_per_prompt < 2:
        raise UserError(
            f"samples_per_prompt={samples_per_prompt}: {algorithm} judges the responses to a prompt against each "
            "other, and needs at least 2; 4 to 16 are usual"
        )


group_advantages = tensor_function("realhf.algorithms.grpo.functions:group_advantages")

grpo_loss = policy_loss("realhf.algorithms.grpo.functions:grpo_policy")
