"""What an experiment imports: `from realhf.api import auto, ModelFunctionCallDef, ...`.

The code of an interface also imports `realhf.engine.interface` (arguments and results of a call) and
`realhf.algorithms.functional` (the mathematics). These import torch; this module does not.
"""

from realhf.api.experiment import (
    DatasetExtent,
    Evaluation,
    KeyExtent,
    ModelSetup,
    OptimizerConfig,
    auto,
)
from realhf.api.generation import GenerationOptions
from realhf.api.model_source import ModelSource, model_source
from realhf.architecture.compute import ComputeConfig
from realhf.architecture.model import DecoderConfig, DType, Experts, RopeScaling
from realhf.architecture.named import ARCHITECTURES, architecture
from realhf.architecture.transformers_config import transformers_model
from realhf.base.errors import RunError, UserError
from realhf.dataflow.follow import Follow
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph, ModelFunctionCallDef
from realhf.dataflow.interface import InterfaceConfig
from realhf.dataflow.plan import CallPlan, ExecutionPlan, load_plan, save_plan
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
    "THREE_D_PP_AS_DP",
    "THREE_D_PP_ONLY",
    "THREE_D_PROTO",
    "TRAIN_STEP",
    "CallPlan",
    "ComputeConfig",
    "DType",
    "DataflowGraph",
    "DatasetExtent",
    "DecoderConfig",
    "DeviceMesh",
    "Division",
    "Evaluation",
    "ExecutionPlan",
    "Experts",
    "Follow",
    "GenerationOptions",
    "InterfaceConfig",
    "KeyExtent",
    "Layout",
    "ModelFunctionCallDef",
    "ModelSetup",
    "ModelSource",
    "OptimizerConfig",
    "ParallelStrategy",
    "RopeScaling",
    "RunError",
    "TransferProtocol",
    "UserError",
    "all_micro_dp",
    "architecture",
    "auto",
    "load_plan",
    "model_source",
    "save_plan",
    "transformers_model",
]
