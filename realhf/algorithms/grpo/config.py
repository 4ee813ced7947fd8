"""Hyperparameters of GRPO and its relatives: Dr. GRPO, DAPO, GSPO, CISPO, SAPO, LUSPO, VESPO."""

from dataclasses import dataclass

from realhf.algorithms.choices import GRPOLoss, Ratio, RewardScale, check_choice
from realhf.algorithms.options import ClippedOptions, coefficients
from realhf.api.script.functions import (
    SEQUENCE_MEAN,
    TOKEN_MEAN,
    BoundLoss,
    Reduction,
    loss_function,
    sequence_sum_over,
    tensor_function,
)
from realhf.base.errors import UserError
from realhf.base.numbers import Range, check_ranges

_RANGES = {
    "delta": Range("delta (0: none)", 0, 1e6),
    "ratio_cap": Range("ratio_cap", 1, 1e6),
    "sapo_temperature_up": Range("sapo_temperature_up", 1e-6, 1e6),
    "sapo_temperature_down": Range("sapo_temperature_down", 1e-6, 1e6),
    "groups_per_step": Range("groups_per_step (0: all)", 0, 2**20),
    **coefficients(
        "beta", "off_policy_threshold", "vespo_k_up", "vespo_lambda_up", "vespo_k_down", "vespo_lambda_down"
    ),
}


@dataclass(frozen=True, kw_only=True)
class GRPO(ClippedOptions):
    """The settings that GRPO's calls share, with the options of rollouts.

    A response's advantage is its reward against the mean of its group, the responses to one prompt. GSPO is
    ratio="sequence", Dr. GRPO is loss_type="dr_grpo" with scale_rewards="none", DAPO is the default loss with
    clip_high=0.28, drop_uniform_groups and mask_truncated.
    """

    samples_per_prompt: int = 8
    loss_type: GRPOLoss = "dapo"
    """The loss of a token, and how tokens are reduced: "grpo" the mean over each response, then over responses; "bnpo"
    and "dapo" the mean over the tokens of the mini-batch; "dr_grpo" the sum over tokens / (responses x max_new_tokens);
    "luspo" the sum over tokens / responses; "cispo", "vespo" REINFORCE with weighted tokens, mean over tokens; "sapo" a
    smooth gate in place of the clip, reduced as "grpo"."""
    scale_rewards: RewardScale = "group"
    """What a reward's distance from the mean of its group is divided by: the group's deviation, the batch's, or 1."""
    beta: float = 0.02
    """The coefficient of the divergence from the reference in the loss (k3). 0 needs no reference."""
    unbiased_kl: bool = True
    """The divergence's terms are weighted by the ratio, which makes their gradient unbiased (DeepSeek-V3.2)."""
    delta: float = 0.0
    """The largest ratio for bad tokens, above 1 + clip_high (INTELLECT-2); 0: any."""
    ratio: Ratio = "token"
    """Of each token, of the whole response (GSPO), or of the response with the gradient of each token (GSPO-token)."""
    ratio_cap: float = 5.0
    """The largest ratio of "cispo"."""
    sapo_temperature_up: float = 1.0
    sapo_temperature_down: float = 1.05
    vespo_k_up: float = 2.0
    vespo_lambda_up: float = 3.0
    vespo_k_down: float = 3.0
    vespo_lambda_down: float = 2.0
    off_policy_threshold: float = 0.0
    """Leaves out bad responses from which the policy has moved by more than this on average (DeepSeek-V3.2); 0: off."""
    drop_uniform_groups: bool = False
    """Leaves out groups whose responses all have one reward: they teach nothing, and would count in means."""
    groups_per_step: int = 0
    """With `drop_uniform_groups`: the first so many of the other groups are trained on. What a step lacks, later steps
    make up for. 0: all."""

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
        check_ranges(vars(self), _RANGES)
        for name, choices in (("loss_type", GRPOLoss), ("scale_rewards", RewardScale), ("ratio", Ratio)):
            check_choice(name, getattr(self, name), choices)
        check_groups(self.samples_per_prompt, "GRPO")
        if self.delta and self.delta <= 1 + self.clip_high:
            raise UserError(
                f"delta={self.delta} must be above 1 + clip_high={1 + self.clip_high:g}, which clips the ratio of good "
                "tokens; raise it, or set it to 0 for no bound"
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

_policy = loss_function("realhf.algorithms.grpo.functions:grpo_policy")
_policy_with_entropy = loss_function("realhf.algorithms.grpo.functions:grpo_policy_with_entropy")


def grpo_loss(grpo: GRPO) -> BoundLoss:
    """The loss of `loss_type`, with the entropy where it has a coefficient: entropies take a pass over the logits."""
    return (_policy_with_entropy if grpo.entropy_coef else _policy)(grpo)
