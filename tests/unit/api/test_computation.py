"""How a model is computed: what the experiment fixes, what the plan says, what holds otherwise."""

import re

import msgspec
import pytest

from experiments.ppo import PPOExperiment
from realhf.api.computation import check_given, computation_of, open_choices
from realhf.api.experiment import ModelSetup, OptimizerConfig
from realhf.api.resolved import ResolvedExperiment
from realhf.architecture.compute import Computation, ComputeConfig
from realhf.base.errors import UserError
from realhf.dataflow.plan import CallCompute, CallPlan, ExecutionPlan

OPTIMIZER = OptimizerConfig()


def test_where_nothing_is_said_the_defaults_hold() -> None:
    assert computation_of("actor", ModelSetup(optimizer=OPTIMIZER)) == Computation()


def test_the_plan_decides_what_is_open() -> None:
    setup = ModelSetup(optimizer=OPTIMIZER, compute=ComputeConfig(data_parallel="fsdp"))
    planned = CallCompute(recomputation="full", sequence_parallel=True, offload_states=True, prefetch=False)
    found = computation_of("actor", setup, planned)
    assert found == Computation(
        data_parallel="fsdp", prefetch=False, sequence_parallel=True, recomputation="full", offload_states=True
    )
    assert OPTIMIZER.run_with(found).offload_states is True
    assert open_choices(setup) == ("recomputation", "sequence_parallel", "prefetch", "offload_states")


@pytest.mark.parametrize(
    ("compute", "optimizer", "planned"),
    [
        (ComputeConfig(recomputation="off"), OPTIMIZER, CallCompute(recomputation="full")),
        (ComputeConfig(data_parallel="zero1"), OPTIMIZER, CallCompute(data_parallel="fsdp")),
        (ComputeConfig(sequence_parallel=False), OPTIMIZER, CallCompute(sequence_parallel=True)),
        (ComputeConfig(), OptimizerConfig(offload_states=False), CallCompute(offload_states=True)),
    ],
)
def test_a_fixed_choice_is_never_overridden(
    compute: ComputeConfig, optimizer: OptimizerConfig, planned: CallCompute
) -> None:
    setup = ModelSetup(optimizer=optimizer, compute=compute)
    [field] = planned.chosen
    with pytest.raises(UserError, match=f"'actor': the plan says {field}=.*experiment fixes {field}=.*leave it out"):
        computation_of("actor", setup, planned)
    assert field not in open_choices(setup)


def test_layers_are_counted_where_recomputation_is_open() -> None:
    planned = CallCompute(recomputation="full", recomputed_layers=2)
    found = computation_of("actor", ModelSetup(optimizer=OPTIMIZER), planned)
    assert found == Computation(recomputation="full", recomputed_layers=2)
    assert [found.recomputed.of(place) for place in range(4)] == ["full", "full", "off", "off"]
    fixed = ModelSetup(optimizer=OPTIMIZER, compute=ComputeConfig(recomputation="full"))
    with pytest.raises(UserError, match=r"'actor': the plan says recomputed_layers=2, .* no choice of recomputation"):
        computation_of("actor", fixed, planned)


def test_a_plan_says_nothing_that_the_backend_cannot_do() -> None:
    megatron = ModelSetup(optimizer=OPTIMIZER, backend="megatron")
    assert "data_parallel" not in open_choices(megatron)
    with pytest.raises(UserError, match="data_parallel='fsdp', which backend='megatron' cannot do"):
        computation_of("actor", megatron, CallCompute(data_parallel="fsdp"))
    modes = CallCompute(data_parallel=(("layers.*.q", "2 sharded"),))
    assert computation_of("actor", ModelSetup(optimizer=OPTIMIZER), modes).data_parallel == modes.data_parallel
    with pytest.raises(UserError, match="a mode for each operator, which backend='transformers' cannot do"):
        computation_of("actor", ModelSetup(optimizer=OPTIMIZER, backend="transformers"), modes)
    assert open_choices(ModelSetup(optimizer=OPTIMIZER, backend="transformers")) == ("data_parallel", "offload_states")


PPO = ResolvedExperiment(PPOExperiment(batch_size=8, evaluate=False))
PLAN = ExecutionPlan(num_devices=2, calls=dict.fromkeys(PPO.graph.model_calls, CallPlan(devices=(0, 2), dp=2)))


def check(plan: ExecutionPlan, experiment: ResolvedExperiment = PPO) -> None:
    check_given(plan, experiment, experiment.stale(plan.staleness).graph, 8, 2)


def computed(**by_call: CallCompute) -> ExecutionPlan:
    calls = {name: msgspec.structs.replace(PLAN.calls[name], compute=compute) for name, compute in by_call.items()}
    return msgspec.structs.replace(PLAN, calls=PLAN.calls | calls)


def test_a_given_plan_that_can_run() -> None:
    check(PLAN)
    check(msgspec.structs.replace(PLAN, staleness=1))
    check(computed(actor_train_step=CallCompute(recomputation="full")))


FIXING = ModelSetup(optimizer=OPTIMIZER, compute=ComputeConfig(recomputation="off"))


class Fixed(PPOExperiment):
    @property
    def models(self) -> dict[str, ModelSetup]:
        return {**super().models, "actor": FIXING}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (msgspec.structs.replace(PLAN, calls={}), "the plan is for other calls: it has , the experiment has actor_"),
        (
            msgspec.structs.replace(PLAN, num_devices=5),
            "the plan is for 5 devices but the cluster has 2; give a larger cluster or make a plan for this one",
        ),
        (
            computed(actor_train_step=CallCompute(recomputation="full")),
            "model 'actor': the plan says recomputation='full', and the experiment fixes recomputation='off'",
        ),
    ],
)
def test_a_given_plan_that_cannot_run(plan: ExecutionPlan, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        check(plan, ResolvedExperiment(Fixed(batch_size=8, evaluate=False)))
