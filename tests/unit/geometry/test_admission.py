"""Where decode steps are graphs, prompts that wait for room are computed together, and rollouts are the same."""

import pytest

from realhf.api.generation import GenerationOptions
from realhf.engine.generate import loop
from realhf.engine.generate.decode_graphs import DecodeWorkspace
from realhf.engine.generate.loop import generate
from realhf.engine.interface import GenerationRequest
from realhf.geometry.batching import Scheduler, Step
from tests.unit.engine.captures import EagerCapture
from tests.unit.engine.losses import tiny
from tests.unit.engine.test_decode_graphs import batch_of, decoder_of
from tests.unit.engine.test_generate import KEY, assert_same_rollouts


def test_prompts_come_together_where_steps_without_them_are_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Step] = []

    class Seen(Scheduler):
        def plan(self) -> Step:
            steps.append(super().plan())
            return steps[-1]

    monkeypatch.setattr(loop, "Scheduler", Seen)
    decoder, batch = decoder_of(tiny(num_layers=2)), batch_of(90)
    options = GenerationOptions(max_new_tokens=24, eos_token=2, temperature=1.3)
    request = GenerationRequest(options, sample_key=KEY, micro_batches=2)  # 45 at a time

    def newcomers(workspace: DecodeWorkspace | None) -> list[int]:
        """How many sequences began in each step that had any."""
        steps.clear()
        rollouts.append(generate(decoder, batch, request, workspace)[0])
        return [len(step.drawing) - len(step.decodes) for step in steps if step.prefills]

    rollouts: list = []
    one_by_one, together = newcomers(None), newcomers(DecodeWorkspace(EagerCapture()))
    assert sum(one_by_one) == sum(together) == 90
    assert 1 in one_by_one
    assert min(together[:-1]) >= 3
    assert len(together) < len(one_by_one)
    assert_same_rollouts(*rollouts)
