"""What the calls of `stale_job.py` do."""

from collections.abc import Sequence
from pathlib import Path

import torch
from stale_job import Answers, MeetingSFT

from realhf.algorithms.script.update import UpdateInterface
from realhf.api import GenerationOptions
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult, Context, GenerationRequest, Model
from tests.waiting import wait_until


class AnswersInterface:
    def __init__(self, config: Answers):
        self._config = config

    def generate(self, model: Model, batch: Batch, context: Context) -> CallResult:
        if self._config.meeting:
            (Path(self._config.meeting) / f"answers {context.step}").touch()
        options = GenerationOptions(max_new_tokens=self._config.max_new_tokens, eos_token=-1, temperature=0.0)
        sample_key = (context.seed, context.step)
        output = model.generate(
            batch, GenerationRequest(options, sample_key=sample_key, micro_batches=context.micro_batches)
        )
        lengths = [torch.tensor([len(prompt)]) for prompt in batch.data["prompt"]]
        return CallResult(outputs={"tokens": output.sequences, "prompt_length": lengths})


class MeetingSFTInterface(UpdateInterface):
    def __init__(self, config: MeetingSFT):
        super().__init__(config)
        self._meeting, self._ahead, self._steps = config.meeting, config.ahead, config.steps

    def train_step(self, model: Model, mini_batches: Sequence[Batch], context: Context) -> CallResult:
        later = context.step + self._ahead
        if self._meeting and later < self._steps:
            wait_until((Path(self._meeting) / f"answers {later}").exists, f"answers for {later}, at {context.step}")
        return super().train_step(model, mini_batches, context)
