"""Decoders that a test makes without a model around them, and their random weights."""

import torch
from torch import Tensor

from realhf.architecture.model import DecoderConfig
from realhf.engine.arena import Arena
from realhf.engine.build import build_arena, decoder_on, fill_initial
from realhf.geometry.boxes import Box, device_boxes
from realhf.models.decoder import Decoder
from realhf.parallel.groups import ParallelGroups


def build_decoder(
    config: DecoderConfig, groups: ParallelGroups, dtype: torch.dtype, arena: Arena | None = None
) -> Decoder:
    """A rank's part of a model, all parameters views of `arena`; zeros in host memory if it is not given."""
    return decoder_on(config, groups, (arena or build_arena(config, groups, dtype, torch.device("cpu"))).views())


def boxes(decoder: Decoder) -> dict[str, tuple[Box, Tensor]]:
    """By name, the rank's parameters: their boxes and local tensors."""
    local = dict(decoder.named_parameters())
    groups = decoder.groups
    return {
        box.name: (box, local[box.name].detach()) for box in device_boxes(decoder.config, groups.layout, groups.rank)
    }


def initialise(decoder: Decoder, seed: int) -> None:
    fill_initial(decoder.config, boxes(decoder).values(), seed)
