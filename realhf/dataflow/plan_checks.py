"""Whether an execution plan can run a graph, and why not."""

from collections.abc import Iterable

from realhf.architecture.compute import ModeRules
from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError
from realhf.dataflow.copies import with_copies
from realhf.dataflow.graph import DataflowGraph, ModelFunctionCallDef
from realhf.dataflow.offload import check_offload
from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.dataflow.protocols import THREE_D_PROTO
from realhf.geometry.layout import Layout, check_strategy, chunk_layers
from realhf.geometry.micro_dp import contains, contains_home, grouped_like
from realhf.geometry.reproducible import gradient_parts, unordered, unordered_training
from realhf.geometry.shards import shard_boxes

# Fields of a call's `compute` that are for the home of its model, and for generations.
_OF_HOMES = ("data_parallel", "prefetch")
_OF_GENERATIONS = ("decode_graphs", "kv_cache_tokens")


def check_plan(plan: ExecutionPlan, graph: DataflowGraph, batch_size: int) -> None:
    """Raises UserError when `plan` cannot run `graph` with `batch_size` samples a step."""
    if set(plan.calls) != set(graph.model_calls):
        needed = _names(graph.model_calls)
        raise UserError(
            f"the plan is for other calls: it has {_names(plan.calls)}, the experiment has {needed}; make a "
            "plan for this experiment with `realhf plan`"
        )
    if not set(plan.beside) <= set(graph.beside):
        raise UserError(
            f"the plan has calls beside the devices, {_names(plan.beside)}, that the experiment does not have; make a "
            "plan for this experiment with `realhf plan`"
        )
    for model, config in graph.models.items():
        if plan.models.get(model, config) != config:
            raise UserError(
                f"the plan is for another model: its {model!r} is {plan.models[model]}, the experiment's is {config}; "
                "make a plan for this experiment with `realhf plan`"
            )
    graph.rows_per_step(batch_size)
    for name, call in plan.calls.items():
        definition = graph.calls[name]
        first, count = call.devices
        if call.strategy.size != count:
            raise UserError(f"{name}: {call.strategy} needs {call.strategy.size} devices but devices={[first, count]}")
        if first + count > plan.num_devices:
            raise UserError(
                f"{name}: devices={[first, count]} do not lie within the {plan.num_devices} devices of the plan"
            )
        check_strategy(name, definition.config, call.strategy)
        if call.chunks > 1 and definition.generates:
            raise UserError(
                f"{name}: chunks={call.chunks} is for train_step and inference calls, and this one generates; leave "
                "chunks out here: the parameters are reallocated between layouts with chunks and without"
            )
        per_mini_batch = definition.mini_batch_size(batch_size)
        definition.check_protocol(call.layout)
        if definition.reproducible and definition.uses_model:
            _check_reproducible(name, definition, call, per_mini_batch)
        parts = definition.parts(call.layout)
        if per_mini_batch % (parts * call.micro_batches):
            what = "dp" if definition.protocol is THREE_D_PROTO else f"parts of {definition.protocol.name}"
            raise UserError(
                f"{name}: {what}={parts} x micro_batches={call.micro_batches} does not divide the mini-batch of "
                f"{per_mini_batch} samples; choose a product that divides {per_mini_batch}"
            )
    check_confined(plan, graph)
    _check_homes(plan, graph)
    _check_compute(plan, graph)
    _check_micro_dp(plan, graph)
    if (
        problem := problem_of_copies(plan, graph)
        or problem_of_order(plan, graph)
        or _problem_of_broadcasts(plan, graph)
        or _problem_of_changes(plan, graph)
    ):
        raise UserError(problem)
    check_offload(plan.offload, graph)


def _check_reproducible(name: str, definition: ModelFunctionCallDef, call: CallPlan, per_mini_batch: int) -> None:
    """Raises UserError for a layout under which the call's results would have other bits than under others."""
    problem = unordered(definition.config, call.strategy)
    if definition.trains:
        problem = problem or unordered_training(call.dp, call.micro_batches, gradient_parts(per_mini_batch))
    if problem:
        raise UserError(f"{name} under reproducible='layout': {problem}")


def check_confined(plan: ExecutionPlan, graph: DataflowGraph) -> None:
    """Raises UserError for a call on devices beyond the pool of its model."""
    for name, call in plan.calls.items():
        model = graph.calls[name].model_name
        if (pool := graph.pools.get(model)) and call.mesh not in pool:
            raise UserError(
                f"{name}: devices={list(call.devices)} are not all of {pool}, to which model {model!r} is confined; "
                "choose devices of the pool, or change it"
            )


def problem_of_copies(plan: ExecutionPlan, graph: DataflowGraph) -> str:
    """Why a call cannot take its copy of the parameters from where the plan says; empty where all can."""
    copies = plan.copies
    for name, source in copies.items():
        says, model = f"{name}: copy_from={source!r}", graph.model_calls[name].model_name
        calls = [call.name for call in graph.calls_of(model)]
        home = plan.layout(plan.home(graph, model))
        if source not in calls or source == name:
            copied = [call for call in calls if call != name and plan.layout(call) != home]
            remedy = f"choose from {', '.join(copied)}, or leave it out" if copied else "leave it out"
            return (
                f"{says} is no other call of its model {model!r} with a copy; {remedy}: the copy then comes from the "
                "model's home"
            )
        if plan.layout(name) == home:
            return f"{says}, but its layout is that of its model's home and needs no copy; leave it out"
        if plan.layout(source) == home:
            return f"{says}, which has no copy: it runs in the home of model {model!r}; leave it out"
        if root := copies.get(source):
            return f"{says}, whose own copy is from {root}; give copy_from={root!r} here, too"
        if model in plan.offload:
            return (
                f"{says}, but model {model!r} waits in host memory, from where all its copies come; leave copy_from "
                "out, or take the model out of offload"
            )
        if _versions(graph, name) != _versions(graph, source):
            return f"{says}, which uses another version of the parameters; leave it out"
        if graph.order.index(source) > graph.order.index(name):
            return f"{says}, which runs after it; leave it out, or give {source} copy_from={name!r}"
        for other in calls:
            if plan.layout(other) == plan.layout(source) and other != source and copies.get(other) != source:
                return (
                    f"{says}, whose copy is kept meanwhile, but {other} has the same layout and makes a copy of its "
                    f"own; give {other} copy_from={source!r} too, or another layout"
                )
    return ""


def moves_of(plan: ExecutionPlan, graph: DataflowGraph) -> list[str]:
    """The calls whose parameters come from another layout, and the nodes of models that follow others."""
    homes = {name: plan.layout(plan.home(graph, call.model_name)) for name, call in graph.model_calls.items()}
    away = [name for name, home in homes.items() if plan.layout(name) != home and not plan.takes_over(name)]
    return [*away, *graph.follows]


def _problem_of_broadcasts(plan: ExecutionPlan, graph: DataflowGraph) -> str:
    moves = moves_of(plan, graph)
    if others := [name for name in plan.broadcasts if name not in moves]:
        which = f"choose from {', '.join(moves)}, or leave it out" if moves else "leave it out"
        return f"broadcasts: {others[0]!r} is no call or model whose parameters come from another layout; {which}"
    return ""


def keeping(plan: ExecutionPlan, graph: DataflowGraph) -> list[str]:
    """The calls whose copies may keep their memory, to get only what changed: they come from home, beside it, and serve
    no others."""
    copies, away = plan.copies, [name for name in moves_of(plan, graph) if name in graph.model_calls]
    of_others = {*copies, *copies.values(), *(name for name, call in plan.calls.items() if call.compute.in_place)}
    shared = {(graph.model_calls[name].model_name, plan.layout(name)) for name in of_others}
    return [name for name in away if (graph.model_calls[name].model_name, plan.layout(name)) not in shared]


def _problem_of_changes(plan: ExecutionPlan, graph: DataflowGraph) -> str:
    calls = keeping(plan, graph)
    if others := [name for name in plan.changes if name not in calls]:
        which = f"choose from {', '.join(calls)}, or leave it out" if calls else "leave it out"
        return (
            f"changes: {others[0]!r} is no call that takes its parameters from home, not in place and for itself "
            f"alone; {which}"
        )
    return ""


def _versions(graph: DataflowGraph, name: str) -> set[tuple[str, int]]:
    """The calls that a call must wait for to have its version of the parameters."""
    return {(edge.parent, edge.steps_back) for edge in graph.parents(name) if edge.kind == "version"}


def _check_homes(plan: ExecutionPlan, graph: DataflowGraph) -> None:
    """A trained model's gradients and optimizer states stay in one place."""
    for call in graph.model_calls.values():
        home = plan.home(graph, call.model_name)
        if call.trains and plan.layout(call.name) != plan.layout(home):
            raise UserError(
                f"{call.name} is planned as {plan.layout(call.name)} but {home} trains the same model as "
                f"{plan.layout(home)}; give all train_step calls of one model the same devices, dp, tp, pp and chunks"
            )


def _check_compute(plan: ExecutionPlan, graph: DataflowGraph) -> None:
    """Each call states only the parts of its computation that are its own."""
    for name, call in plan.calls.items():
        definition = graph.model_calls[name]
        home = plan.home(graph, definition.model_name)
        for field, value in call.compute.chosen.items():
            says = f"{name}: compute has {field}={value!r}, which is for"
            if field in _OF_HOMES and name != home and not definition.trains:
                raise UserError(
                    f"{says} the home of model {definition.model_name!r}; leave it out, or say it of {home}"
                )
            if field in _OF_GENERATIONS:
                _check_generation(definition, f"{says} generate calls", field, value)
                continue
            if field == "in_place":
                _check_in_place(plan, name, plan.calls[home], definition.config)
                continue
            if field not in _OF_HOMES and not definition.trains:
                raise UserError(f"{says} train_step calls, and this one trains nothing; leave it out")
        if isinstance(rules := call.compute.data_parallel, tuple):
            _check_modes(name, call.layout, rules, definition.config)
        if (number := call.compute.recomputed_layers) is not None:
            _check_recomputed(name, call, number, definition.config)
        if definition.trains and call.compute != plan.calls[home].compute:
            raise UserError(
                f"{name} is planned with compute={call.compute.chosen} but {home} trains the same model with "
                f"compute={plan.calls[home].compute.chosen}; give all train_step calls of one model the same compute"
            )


def _check_in_place(plan: ExecutionPlan, name: str, home: CallPlan, config: DecoderConfig) -> None:
    """Raises UserError where the home's parameters cannot go into a call's copy before the rest of it comes."""
    call, copies = plan.calls[name], plan.copies
    says = f"{name}: compute has in_place={call.compute.in_place}, which is for"
    if not contains_home(config.num_layers, home.layout, call.layout):
        raise UserError(
            f"{says} copies on the home's devices that contain its part on each; {call.layout} has another part than "
            f"{home.layout}, or is the home: leave it out"
        )
    if name in copies or name in copies.values():
        raise UserError(
            f"{says} copies that come from the home, and are kept for no other call; leave it out, or copy_from"
        )


def _check_modes(name: str, layout: Layout, rules: ModeRules, config: DecoderConfig) -> None:
    try:
        for stage in range(layout.strategy.pp):  # each has other operators
            shard_boxes(config, layout, layout.device(0, 0, stage), rules)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def _check_recomputed(name: str, call: CallPlan, number: int, config: DecoderConfig) -> None:
    most = len(chunk_layers(config.num_layers, call.strategy, 0)[0])
    if not 0 <= number <= most:
        raise UserError(
            f"{name}: compute has recomputed_layers={number}, and each stage of this model (each of its chunks) has at "
            f"most {most} layers; choose 0 to {most}, or leave it out for all"
        )
    if call.compute.recomputation in (None, "off"):
        raise UserError(
            f"{name}: compute has recomputed_layers={number} without the kind of recomputation; add "
            'recomputation "selective" or "full", or leave it out'
        )


def _check_generation(definition: ModelFunctionCallDef, says: str, field: str, value: object) -> None:
    fixed = getattr(definition.interface_impl, field, None)
    if not definition.generates:
        raise UserError(f"{says}, and this one generates nothing; leave it out")
    if fixed not in (None, value):
        raise UserError(
            f"{says} that leave it open, and the experiment fixes {field}={fixed!r}; leave it out of the plan, "
            "or out of the experiment"
        )


def _check_micro_dp(plan: ExecutionPlan, graph: DataflowGraph) -> None:
    """Micro data-parallel groups are those of a home on the same devices."""
    for name, call in plan.calls.items():
        if call.micro_dp == (1, 1):
            continue
        definition = graph.calls[name]
        home_call = plan.home(graph, definition.model_name)
        home, num_layers = plan.layout(home_call), definition.config.num_layers
        if name == home_call:
            raise UserError(f"{name}: micro_dp={list(call.micro_dp)} in the home of its model; leave it out here")
        if call.mesh != home.mesh or not contains(call.layout, home, num_layers):
            fitting = grouped_like(home, call.layout, num_layers)
            remedy = f"set it to {list(fitting.strategy.micro_dp)}" if fitting else "leave it out"
            raise UserError(
                f"{name}: with micro_dp={list(call.micro_dp)}, {call.strategy} does not contain the home's part on "
                f"every device; the home is {home} of {home_call}; {remedy}"
            )


def problem_of_order(plan: ExecutionPlan, graph: DataflowGraph) -> str:
    """Why calls cannot be issued in the plan's order; empty where they can."""
    if not plan.order:
        return ""
    place = {entry.call: (entry.steps_back, i) for i, entry in enumerate(plan.order)}
    if sorted(entry.call for entry in plan.order) != sorted(graph.nodes):
        return f"order must name every call once; the calls are {_names(graph.nodes)}"
    for entry in plan.order:
        if not 0 <= entry.steps_back < plan.max_steps_in_flight:
            return (
                f"order: steps_back={entry.steps_back} of {entry.call} must be from 0 to "
                f"{plan.max_steps_in_flight - 1}, since max_steps_in_flight={plan.max_steps_in_flight}"
            )
    for edge in with_copies(graph, plan.copies).edges:
        parent_back, parent_place = place[edge.parent]
        child_back, child_place = place[edge.child]
        # The parent of step t - edge.steps_back is issued in period t - edge.steps_back + parent_back.
        if (parent_back - edge.steps_back, parent_place) >= (child_back, child_place):
            return (
                f"order: {edge.child} needs the result of {edge.parent} but is scheduled before it; move {edge.child} "
                f"after {edge.parent}"
            )
    return ""


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
