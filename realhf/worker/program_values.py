"""Values of a live program: those that it fetches, and those that it gives."""

from pathlib import Path

import torch
from safetensors import safe_open

from realhf.algorithms.script.evaluate import Evaluation
from realhf.api.script.config import Fetch, Given
from realhf.data.recorded import step_folder
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult, Context
from realhf.engine.returned import InterfaceError
from realhf.worker.rollouts import record


class FetchInterface:
    """See `Fetch`. bfloat16 is written as float32, since NumPy has none."""

    def __init__(self, config: Fetch):
        self.config = config

    def inference(self, model: None, batch: Batch, context: Context) -> CallResult:
        columns = Evaluation(batch, context, ()).data(self.config.batch)
        if context.holds_outputs:
            written = {
                name: [value.float() if value.dtype == torch.bfloat16 else value for value in values]
                for name, values in columns.items()
            }
            record(Path(self.config.folder), context.step, self.config.title, batch.ids[0], written, batch.ids)
        return CallResult()


class GivenInterface:
    """See `Given`."""

    def __init__(self, config: Given):
        self.config = config

    def inference(self, model: None, batch: Batch, context: Context) -> CallResult:
        (key,) = self.config.output_data
        path = step_folder(Path(self.config.folder), context.step) / f"{self.config.title}.safetensors"
        try:
            with safe_open(path, framework="pt") as file:
                values = [file.get_tensor(str(sample)) for sample in batch.ids]
        except Exception as error:  # the library raises exceptions of its own
            raise InterfaceError(f"{path}, which the program has written, cannot be read: {error}") from None
        return CallResult(outputs={key: values} if context.holds_outputs else {})
