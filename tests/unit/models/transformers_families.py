"""Small models of families that this project's decoder does not know, and one that it does, for `transformers`."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

from realhf.architecture import transformers_config
from realhf.architecture.compute import Computation
from realhf.architecture.transformers_config import TransformersConfig, transformers_model
from realhf.engine.backend import ModelSpec
from realhf.engine.transformers_backend import TransformersModel
from realhf.models.opening import open_checkpoint
from realhf.models.transformers_models import SCORE, describe
from realhf.parallel.groups import ParallelGroups
from tests.unit.engine.losses import ONE_RANK
from tests.unit.models.families import Oracle, computing_in, oracle

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 24,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Gemma 3: two rotary bases, windows, tied embeddings. OLMo 2: norms behind the blocks. Phi: biases, one of the head's,
# and blocks side by side.
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma3Text": {"head_dim": 8, "sliding_window": 4},
    "Olmo2": {},
    "Phi": {"num_key_value_heads": 4},
    "Llama": {},
}


def small(family: str, directory: Path, dtype: torch.dtype = torch.float64) -> Oracle:
    """A random model of transformers, saved in `directory`."""
    return oracle(getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family]), directory, dtype)


def described(directory: Path) -> TransformersConfig:
    """As `transformers_model`, in this process."""
    with mock.patch.object(transformers_config, "_described", lambda text, _: describe(text)):
        return transformers_model(directory)


def loaded(
    directory: Path,
    config: TransformersConfig,
    groups: ParallelGroups = ONE_RANK,
    dtype: torch.dtype = torch.float64,
    new_head: bool = False,
    **arguments: Any,
) -> TransformersModel:
    """Our model with the weights of a checkpoint of either kind, under a fresh head with `new_head`."""
    arguments.setdefault("compute", Computation())
    with computing_in(dtype):
        model = TransformersModel(ModelSpec(config, groups, dtype, **arguments))
    reader = open_checkpoint(directory, config, new_head)
    if new_head:
        model.initialise(0)
    for box, tensor in model.residency.held():
        if not (new_head and box.name == SCORE):
            reader.read_into(tensor, box)
    model.residency.written()
    return model
