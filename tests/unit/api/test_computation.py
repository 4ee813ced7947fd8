"""How a model is computed: what the experiment fixes, what the plan says, what holds otherwise."""

import pytest

from realhf.api.computation import computation_of, open_choices
from realhf.api.experiment import ModelSetup, OptimizerConfig
from realhf.architecture.compute import Computation, ComputeConfig
from realhf.base.errors import UserError
from realhf.dataflow.plan import CallCompute

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
