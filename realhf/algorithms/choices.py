"""The names of what algorithms can be told to do. Without torch: experiments import it."""

from typing import Literal

KLEstimator = Literal["k1", "k2", "k3"]
KLController = Literal["fixed", "adaptive"]
RewardScale = Literal["group", "batch", "none"]
ImportanceCorrection = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
GRPOLoss = Literal["grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"]
Ratio = Literal["token", "sequence", "sequence_token"]
Baseline = Literal["none", "group"]
DPOLoss = Literal["sigmoid", "hinge", "ipo", "robust"]
