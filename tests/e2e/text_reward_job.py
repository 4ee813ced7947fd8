"""PPO in small, whose rewards are functions on texts: for `test_text_rewards.py`."""

from dataclasses import dataclass
from pathlib import Path

from beside_job import BesideJob

from realhf.algorithms.text_reward.config import TextReward
from realhf.api import GENERATE, INFERENCE, Evaluation, Generate, ModelFunctionCallDef, auto
from realhf.data import sort_task
from realhf.rewards.pool import OnError


@auto(batch_size=8)
@dataclass(frozen=True, kw_only=True)
class TextRewardJob(BesideJob):
    functions: tuple[str, ...] = ("in_order", "long=0.1", "judged")
    on_error: OnError = "fail"

    @property
    def rpcs(self) -> list[ModelFunctionCallDef]:
        calls = {call.name: call for call in super().rpcs if call.name not in ("rule", "bonus")}
        return [*calls.values(), self._score()]

    def _score(self) -> ModelFunctionCallDef:
        reward = TextReward(
            rewards=tuple(f"{Path(__file__).with_name('text_reward_functions.py')}:{name}" for name in self.functions),
            tokenizer=str(sort_task.ensure(self.data_dir) / "tokenizer.json"),
            on_error=self.on_error,
            timeout_s=600,
        )
        return ModelFunctionCallDef(
            name="score",
            interface_type=INFERENCE,
            interface_impl=reward,
            input_data=["prompt", "seq"],
            output_data=list(reward.output_data),
        )

    @property
    def evaluation(self) -> Evaluation | None:
        if not self.evaluate:
            return None
        answers = ModelFunctionCallDef(
            name="answers",
            model_name="actor",
            model_type=self.architecture,
            interface_type=GENERATE,
            interface_impl=Generate(max_new_tokens=6, eos_token=sort_task.EOS_TOKEN),
            input_data=["prompt"],
            output_data=["seq"],
        )
        return Evaluation(rpcs=[answers, self._score()], dataset=self._prompts("evaluation.jsonl"), batch_size=256)
