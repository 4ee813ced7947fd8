"""Random weights of a decoder that a test has made without a model around it."""

from torch import Tensor

from realhf.engine.build import fill_initial
from realhf.geometry.boxes import Box, device_boxes
from realhf.models.decoder import Decoder


def boxes(decoder: Decoder) -> dict[str, tuple[Box, Tensor]]:
    """By name, the rank's parameters: their boxes and local tensors."""
    local = dict(decoder.named_parameters())
    groups = decoder.groups
    return {
        box.name: (box, local[box.name].detach()) for box in device_boxes(decoder.config, groups.layout, groups.rank)
    }


def initialise(decoder: Decoder, seed: int) -> None:
    fill_initial(decoder.config, boxes(decoder).values(), seed)
