"""How a model is computed in a run: what its setup fixes, and where that leaves a choice open, what the plan says."""

from typing import Any

from realhf.api.backends import NATIVE
from realhf.api.experiment import ModelSetup
from realhf.api.resolved import ResolvedExperiment
from realhf.architecture.compute import Computation
from realhf.architecture.transformers_config import BACKEND as TRANSFORMERS
from realhf.base.errors import UserError
from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.plan import AS_SET_UP, CallCompute, ExecutionPlan
from realhf.dataflow.plan_checks import check_plan

# The choices of a model's computation that a plan may make, that of recomputation with `recomputed_layers`.
FIELDS = ("recomputation", "sequence_parallel", "data_parallel", "prefetch", "offload_states")


def computation_of(name: str, setup: ModelSetup, planned: CallCompute = AS_SET_UP) -> Computation:
    """The computation of model `name`. `planned` is of the call that is its home.

    Raises:
        UserError: the plan says otherwise than the setup, or what the model's backend cannot do.
    """
    fixed, said = _fixed(setup), planned.chosen
    for field in FIELDS:
        value = said.get(field)
        if value is None:
            continue
        if field in fixed and fixed[field] != value:
            raise UserError(
                f"model {name!r}: the plan says {field}={value!r}, and the experiment fixes {field}={fixed[field]!r}; "
                "leave it out of the plan, or out of the experiment"
            )
        has_modes = field == "data_parallel" and isinstance(value, tuple)
        if has_modes and setup.backend != NATIVE:
            raise UserError(
                f"model {name!r}: the plan says a mode for each operator, which backend={setup.backend!r} cannot do; "
                f"leave data_parallel out of the plan, or choose backend={NATIVE!r}"
            )
        if field not in (*fixed, *open_choices(setup)) and value != getattr(Computation(), field):
            raise UserError(
                f"model {name!r}: the plan says {field}={value!r}, which backend={setup.backend!r} cannot do; leave it "
                "out of the plan"
            )
    if "recomputed_layers" in said and "recomputation" not in open_choices(setup):
        raise UserError(
            f"model {name!r}: the plan says recomputed_layers={said['recomputed_layers']!r}, and the experiment leaves "
            "no choice of recomputation; leave it out of the plan, or recomputation out of the experiment"
        )
    chosen: dict[str, Any] = {field: said[field] for field in (*FIELDS, "recomputed_layers") if field in said}
    return Computation(**{**chosen, **fixed})


def check_given(
    plan: ExecutionPlan, experiment: ResolvedExperiment, graph: DataflowGraph, batch_size: int, num_devices: int
) -> None:
    """Checks a plan that was read from a file for an experiment whose graph is `graph`, or is as a what-if has it.

    Raises:
        UserError: it cannot run the graph with `batch_size` samples a step, is for more devices, or says of a model's
            computation what the experiment, or the model's backend, does not allow.
    """
    check_plan(plan, graph, batch_size)
    if plan.num_devices > num_devices:
        raise UserError(
            f"the plan is for {plan.num_devices} devices but the cluster has {num_devices}; "
            "give a larger cluster or make a plan for this one with `realhf plan`"
        )
    for model, setup in experiment.stale(plan.staleness).setups.items():
        computation_of(model, setup, plan.calls[plan.home(graph, model)].compute)


def open_choices(setup: ModelSetup) -> tuple[str, ...]:
    """The fields of its `Computation` that a plan may choose: the setup leaves them open, and its backend has them."""
    fixed = _fixed(setup)
    lacking: tuple[str, ...] = ()
    if setup.backend == TRANSFORMERS:
        lacking = ("recomputation", "sequence_parallel", "prefetch")
    elif setup.backend == "megatron":
        lacking = ("data_parallel", "prefetch")
    return tuple(field for field in FIELDS if field not in fixed and field not in lacking)


def _fixed(setup: ModelSetup) -> dict[str, Any]:
    states = None if setup.optimizer is None else setup.optimizer.offload_states
    fields = {**vars(setup.compute), "offload_states": states, "reproducible": setup.reproducible}
    return {field: value for field, value in fields.items() if value is not None}
