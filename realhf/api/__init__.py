"""What an experiment imports: `from realhf.api import auto, ModelFunctionCallDef, ...`.

The code of an interface of your own also imports `realhf.engine.interface` (arguments and results of a call) and
`realhf.algorithms.functional` (the mathematics). These import torch; this module does not.
"""

from realhf.api.decorator import auto
from realhf.api.experiment import (
    DatasetExtent,
    Evaluation,
    KeyExtent,
    ModelSetup,
    OptimizerConfig,
)
from realhf.api.generation import GenerationOptions
from realhf.api.model_source import ModelSource, model_source
from realhf.api.script.columns import Columns
from realhf.api.script.config import Generate, Logprobs, Measure, SampledAccuracy, Score, Term, Update, Values
from realhf.api.script.data import Examples, Pairs, Prompts
from realhf.api.script.functions import (
    SEQUENCE_MEAN,
    TOKEN_MEAN,
    Reduction,
    loss_function,
    sequence_sum_over,
    tensor_function,
)
from realhf.api.script.models import Policy, RewardModel, ValueModel, model_method
from realhf.api.script.reward import Reward
from realhf.api.script.views import inputs
from realhf.architecture.compute import ComputeConfig
from realhf.architecture.model import DecoderConfig, DType, Experts, RopeScaling
from realhf.architecture.named import ARCHITECTURES, architecture
from realhf.architecture.transformers_config import transformers_model
from realhf.base.errors import RunError, UserError
from realhf.base.options import Common, Option, Settings
from realhf.dataflow.follow import Follow
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph, ModelFunctionCallDef
from realhf.dataflow.interface import InterfaceConfig
from realhf.dataflow.plan import CallPlan, ExecutionPlan, load_plan, save_plan
from realhf.dataflow.pools import Pool
from realhf.dataflow.protocols import (
    ALL_TO_ALL,
    DP_PROTO,
    ONE_TO_ALL,
    RANK_ZERO,
    THREE_D_PP_AS_DP,
    THREE_D_PP_ONLY,
    THREE_D_PROTO,
    Division,
    TransferProtocol,
    all_micro_dp,
)
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy

__all__ = [
    "ALL_TO_ALL",
    "ARCHITECTURES",
    "DP_PROTO",
    "GENERATE",
    "INFERENCE",
    "ONE_TO_ALL",
    "RANK_ZERO",
    "SEQUENCE_MEAN",
    "THREE_D_PP_AS_DP",
    "THREE_D_PP_ONLY",
    "THREE_D_PROTO",
    "TOKEN_MEAN",
    "TRAIN_STEP",
    "CallPlan",
    "Columns",
    "Common",
    "ComputeConfig",
    "DType",
    "DataflowGraph",
    "DatasetExtent",
    "DecoderConfig",
    "DeviceMesh",
    "Division",
    "Evaluation",
    "Examples",
    "ExecutionPlan",
    "Experts",
    "Follow",
    "Generate",
    "GenerationOptions",
    "InterfaceConfig",
    "KeyExtent",
    "Layout",
    "Logprobs",
    "Measure",
    "ModelFunctionCallDef",
    "ModelSetup",
    "ModelSource",
    "OptimizerConfig",
    "Option",
    "Pairs",
    "ParallelStrategy",
    "Policy",
    "Pool",
    "Prompts",
    "Reduction",
    "Reward",
    "RewardModel",
    "RopeScaling",
    "RunError",
    "SampledAccuracy",
    "Score",
    "Settings",
    "Term",
    "TransferProtocol",
    "Update",
    "UserError",
    "ValueModel",
    "Values",
    "all_micro_dp",
    "architecture",
    "auto",
    "inputs",
    "load_plan",
    "loss_function",
    "model_method",
    "model_source",
    "save_plan",
    "sequence_sum_over",
    "tensor_function",
    "transformers_model",
]
