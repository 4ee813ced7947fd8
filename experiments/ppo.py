"""PPO on the sorting task: four models, six calls."""

from dataclasses import dataclass, field
from functools import partial

from realhf.algorithms.ppo.config import PPOHyperparameters, ppo_advantages, ppo_policy, ppo_value
from realhf.api import (
    GENERATE,
    INFERENCE,
    TRAIN_STEP,
    ComputeConfig,
    DecoderConfig,
    DType,
    Evaluation,
    Follow,
    Generate,
    Logprobs,
    ModelFunctionCallDef,
    ModelSetup,
    ModelSource,
    OptimizerConfig,
    SampledAccuracy,
    Score,
    Update,
    Values,
    auto,
    inputs,
    model_source,
)
from realhf.base.errors import UserError
from realhf.data import sort_task
from realhf.data.datasets import PromptDataset

ROLLOUT = ["prompt", "seq", "logprob", "ref_logprob", "reward", "value"]

SORTING = PPOHyperparameters(max_new_tokens=sort_task.MAX_NEW_TOKENS, eos_token=sort_task.EOS_TOKEN)


@auto(batch_size=128)
@dataclass(frozen=True, kw_only=True)
class PPOExperiment:
    """The actor answers; reward, reference and critic judge; actor and critic learn.

    `model` (the run directory of sft.py) starts actor and reference, `reward_model` (that of reward.py) reward and
    critic; where one is empty, its models have the shape `architecture` and random weights. Both may be Hugging Face
    directories; with `new_value_head` reward and critic get fresh heads on the trunk of a language model.
    `compute` is that of all four models. With `reference_eta` the reference follows the actor: after every
    `reference_every_steps`-th step it becomes eta * actor + (1 - eta) * reference.

    With staleness=k a copy of the actor answers, whose weights have seen all steps of training but the last k (in the
    first k steps, they are those of the start), so that answering for a step does not wait for the training of these.
    Each answer has the version of its weights beside it, `weights_version`.
    """

    seed: int = 0
    steps: int = 80
    batch_size: int = 128
    mini_batches: int = 2
    architecture: DecoderConfig = sort_task.SORT_MODEL
    dtype: DType = "float32"
    model: str = ""
    reward_model: str = ""
    new_value_head: bool = False
    actor_lr: float = 1e-4
    critic_lr: float = 3e-4
    warmup_steps: int = 5
    backend: str = "native"
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    reference_eta: float = 0.0
    reference_every_steps: int = 1
    staleness: int = 0
    ppo: PPOHyperparameters = SORTING
    data_dir: str = "runs/data"
    evaluate: bool = True

    def __post_init__(self) -> None:
        if self.ppo.importance_correction != "none":
            raise UserError(
                f"--ppo.importance-correction {self.ppo.importance_correction} needs the actor's own log-probabilities "
                "before training, and no call here computes them; leave it out, or add such a call to a copy"
            )

    @property
    def _policy(self) -> ModelSource:
        return model_source(self.model, self.architecture, backend=self.backend)

    @property
    def _judge(self) -> ModelSource:
        return model_source(self.reward_model, self.architecture, head="scalar", backend=self.backend)

    @property
    def rpcs(self) -> list[ModelFunctionCallDef]:
        actor, scalar = self._policy.architecture, self._judge.architecture.with_head("scalar")
        step = inputs()
        batch = ppo_advantages(step, step, step, step, self.ppo)
        return [
            ModelFunctionCallDef(
                name="actor_generate",
                model_name="rollout" if self.staleness else "actor",
                model_type=actor,
                interface_type=GENERATE,
                interface_impl=Generate.by(self.ppo),
                input_data=["prompt"],
                output_data=["seq", "logprob", *(["weights_version"] if self.staleness else [])],
            ),
            ModelFunctionCallDef(
                model_name="reward",
                model_type=scalar,
                interface_type=INFERENCE,
                interface_impl=Score(),
                input_data=["seq"],
                output_data=["reward"],
            ),
            ModelFunctionCallDef(
                model_name="reference",
                model_type=actor,
                interface_type=INFERENCE,
                interface_impl=Logprobs(temperature=self.ppo.temperature),
                input_data=["prompt", "seq"],
                output_data=["ref_logprob"],
            ),
            ModelFunctionCallDef(
                model_name="critic",
                model_type=scalar,
                interface_type=INFERENCE,
                interface_impl=Values(),
                input_data=["prompt", "seq"],
                output_data=["value"],
            ),
            ModelFunctionCallDef(
                model_name="actor",
                model_type=actor,
                interface_type=TRAIN_STEP,
                interface_impl=Update(ppo_policy(self.ppo), batch=batch, prefix="actor"),
                input_data=ROLLOUT,
                mini_batches=self.mini_batches,
            ),
            ModelFunctionCallDef(
                model_name="critic",
                model_type=scalar,
                interface_type=TRAIN_STEP,
                interface_impl=Update(ppo_value(self.ppo), batch=batch, prefix="critic", reports=()),
                input_data=ROLLOUT,
                mini_batches=self.mini_batches,
            ),
        ]

    @property
    def models(self) -> dict[str, ModelSetup]:
        sft, reward = self._policy.checkpoint, self._judge.checkpoint
        actor = OptimizerConfig(lr=self.actor_lr, warmup_steps=self.warmup_steps)
        critic = OptimizerConfig(lr=self.critic_lr, warmup_steps=self.warmup_steps)
        setup = partial(ModelSetup, dtype=self.dtype, backend=self.backend, compute=self.compute)
        eta, every_steps = self.reference_eta, self.reference_every_steps
        follows = Follow("actor", eta=eta, every_steps=every_steps) if eta else None
        stale = Follow("actor", eta=1.0, staleness=self.staleness) if self.staleness else None
        return {
            **({"rollout": setup(checkpoint=sft, follows=stale)} if stale else {}),
            "actor": setup(checkpoint=sft, optimizer=actor),
            "reference": setup(checkpoint=sft, follows=follows),
            "reward": setup(checkpoint=reward, new_head=self.new_value_head),
            "critic": setup(checkpoint=reward, new_head=self.new_value_head, optimizer=critic),
        }

    @property
    def dataset(self) -> PromptDataset:
        return self._prompts("prompts.jsonl")

    @property
    def evaluation(self) -> Evaluation | None:
        if not self.evaluate:
            return None
        calls = [self._accuracy_call("accuracy", self.ppo.temperature), self._accuracy_call("accuracy_greedy", 0.0)]
        return Evaluation(rpcs=calls, dataset=self._prompts("evaluation.jsonl", with_answer=True), batch_size=128)

    def _accuracy_call(self, name: str, temperature: float) -> ModelFunctionCallDef:
        return ModelFunctionCallDef(
            name=f"actor_{name}",
            model_name="actor",
            model_type=self._policy.architecture,
            interface_type=GENERATE,
            interface_impl=SampledAccuracy(
                max_new_tokens=self.ppo.max_new_tokens,
                eos_token=self.ppo.eos_token,
                temperature=temperature,
                tokenizer=str(sort_task.ensure(self.data_dir) / "tokenizer.json"),
                statistic=name,
            ),
            input_data=["prompt", "answer"],
        )

    def _prompts(self, file: str, *, with_answer: bool = False) -> PromptDataset:
        data = sort_task.ensure(self.data_dir)
        return PromptDataset(
            path=str(data / file),
            tokenizer=str(data / "tokenizer.json"),
            max_prompt_tokens=sort_task.MAX_PROMPT_TOKENS,
            with_answer=with_answer,
        )
