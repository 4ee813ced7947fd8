"""Opens a checkpoint of any kind: of boxes, or a Hugging Face directory."""

from pathlib import Path
from typing import Protocol

from torch import Tensor

from realhf.architecture.model import DecoderConfig
from realhf.architecture.transformers_config import TransformersConfig
from realhf.geometry.boxes import Box
from realhf.models.checkpoint import CheckpointReader
from realhf.models.hugging_face_files import is_hugging_face
from realhf.models.hugging_face_weights import HuggingFaceReader


class BoxReader(Protocol):
    """A checkpoint of any kind."""

    def read_into(self, tensor: Tensor, box: Box) -> None:
        """Fills `tensor`, of the shape of `box`, converting to its dtype. Raises UserError where it cannot be read."""


def open_checkpoint(directory: Path | str, model: DecoderConfig, new_head: bool = False) -> BoxReader:
    """A reader of `model` from a checkpoint of either kind.

    Raises:
        UserError: there is no checkpoint, or it is of another architecture (with `new_head` its head may differ).
    """
    if is_hugging_face(directory) and isinstance(model, TransformersConfig):
        from realhf.models.transformers_models import TransformersReader  # transformers may not be installed

        return TransformersReader(directory, model, new_head)
    if is_hugging_face(directory):
        return HuggingFaceReader(directory, model, new_head)
    reader = CheckpointReader(directory)
    reader.check_architecture(model, ignore_head=new_head)
    return reader
