"""PPO in small, whose rewards are rules on texts that run beside the devices: for `test_beside.py`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from realhf.api import (
    GENERATE,
    INFERENCE,
    DecoderConfig,
    DType,
    Evaluation,
    Generate,
    InterfaceConfig,
    Logprobs,
    ModelFunctionCallDef,
    ModelSetup,
    auto,
)
from realhf.data import sort_task
from realhf.rundir.run import load_experiment_class

PPOExperiment: Any = load_experiment_class(Path(__file__).parents[2] / "experiments/ppo.py")
TINY = replace(sort_task.SORT_MODEL, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=4)


@dataclass(frozen=True, kw_only=True)
class Rule(InterfaceConfig):
    """INFERENCE: `score` [1] of `seq`, from its tokens and the text of its row, less the mean of all steps so far.

    Statistics: `rule_score`, before the mean is taken off. With a `meeting`, a folder, it begins before the
    reference's inference and ends after it. Where there is a file `trouble` with a step (from 0 on) and a kind of
    trouble, it has that in that step.
    """

    implementation: ClassVar[str] = "beside_job_interface:RuleInterface"
    uses_model: ClassVar[bool] = False
    runs_beside: ClassVar[bool] = True

    meeting: str = ""
    trouble: str = ""
    seconds_per_sample: float = 0.01


@dataclass(frozen=True, kw_only=True)
class Bonus(InterfaceConfig):
    """INFERENCE: `reward` [1], `score` and a bonus for long responses: a rule on what a rule has made."""

    implementation: ClassVar[str] = "beside_job_interface:BonusInterface"
    uses_model: ClassVar[bool] = False
    runs_beside: ClassVar[bool] = True


BONUS = ModelFunctionCallDef(
    name="bonus",
    interface_type=INFERENCE,
    interface_impl=Bonus(),
    input_data=["prompt", "score", "seq"],
    output_data=["reward"],
)


@dataclass(frozen=True, kw_only=True)
class MeetingReference(Logprobs):
    """Its inference begins after the rule and ends before it; "" is no meeting."""

    implementation: ClassVar[str] = "beside_job_interface:MeetingReferenceInterface"

    meeting: str = ""


@auto(batch_size=8)
@dataclass(frozen=True, kw_only=True)
class BesideJob(PPOExperiment):
    batch_size: int = 8
    mini_batches: int = 1
    steps: int = 2
    architecture: DecoderConfig = TINY
    dtype: DType = "float64"
    meeting: str = ""
    trouble: str = ""

    @property
    def rpcs(self) -> list[ModelFunctionCallDef]:
        calls = {call.name: call for call in super().rpcs}
        del calls["reward_inference"]
        reference = MeetingReference(temperature=self.ppo.temperature, meeting=self.meeting)
        calls["reference_inference"] = replace(calls["reference_inference"], interface_impl=reference)
        return [
            *calls.values(),
            BONUS,
            self._rule(Rule(meeting=self.meeting, trouble=self.trouble)),
        ]

    def _rule(self, rule: Rule) -> ModelFunctionCallDef:
        return ModelFunctionCallDef(
            name="rule", interface_type=INFERENCE, interface_impl=rule, input_data=["seq"], output_data=["score"]
        )

    @property
    def models(self) -> dict[str, ModelSetup]:
        return {name: setup for name, setup in super().models.items() if name != "reward"}

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
        return Evaluation(
            rpcs=[answers, self._rule(Rule()), BONUS], dataset=self._prompts("evaluation.jsonl"), batch_size=256
        )
