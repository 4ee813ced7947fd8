"""A plan beside the presets and the alternatives of its calls, and beside those of other clusters or stalenesses: for
people, as data, and as the rationale that is kept with the plan."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import groupby, product
from typing import TYPE_CHECKING, Any

import msgspec

from realhf.base.errors import UserError
from realhf.dataflow.plan import CallCompute, CallPlan, ExecutionPlan, updates_text
from realhf.dataflow.rationale import DeviceMemory, Instead, Rationale, Worth
from realhf.geometry.layout import Layout
from realhf.planning.certificate import Certificate
from realhf.planning.copies import copies_worth, with_best_copies, with_sources
from realhf.planning.dominance import worthwhile
from realhf.planning.explain.analysis import Analysis, analyse
from realhf.planning.model.features import differences
from realhf.planning.options import Option, num_layouts, option_of
from realhf.planning.predict import Prediction, predict, predict_in_best_order, preemptions
from realhf.planning.presets import PresetResult, evaluate_preset, evaluate_presets
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import DeviceNeed, native_problem
from realhf.planning.search import SearchResult
from realhf.planning.task import PlanningTask

if TYPE_CHECKING:
    from realhf.planning.explain.hinges import Hinge
    from realhf.planning.intervals import Draws


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan and what is known of it; `problem` says why it cannot run (`analysis` is None where there is no plan).

    `slower` is the probability that its step takes longer than that of the plan it is compared with.
    """

    name: str
    analysis: Analysis | None
    problem: str = ""
    slower: float | None = None

    @property
    def step_interval_s(self) -> tuple[float, float] | None:
        """In which its step lies in the middle 90 % of the draws."""
        intervals = self.analysis.prediction.plan.intervals if self.analysis else None
        return intervals.step_s if intervals else None

    @property
    def slower_text(self) -> str:
        """For tables: `97%`; what no draw or every draw says is not certain."""
        if self.slower is None:
            return "-"
        return ">99%" if self.slower > 0.99 else "<1%" if self.slower < 0.01 else f"{self.slower:.0%}"


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The fastest of the `num_layouts` other layouts of `call` while all other calls stay; `step_s` is the step's time
    then. `num_too_large` of them do not fit into memory in any way to run the call. `worth` has, for each feature of
    the call, the best of its options without.

    `planned_step_s` is the plan's, simulated in the same way (each call as soon as it can, no given order).
    None if no other layout of the call fits into memory.
    """

    call: str
    option: CallPlan | None
    step_s: float
    planned_step_s: float
    num_layouts: int
    num_too_large: int
    worth: tuple[Worth, ...] = ()

    @property
    def slower_by(self) -> float:
        """As a part of the plan's step."""
        return (self.step_s - self.planned_step_s) / self.planned_step_s


def best_alternatives(task: PlanningTask, plan: ExecutionPlan) -> list[Alternative]:
    """For each call: every other mesh and strategy of it is evaluated with the rest of the plan as it is, but that all
    copies of parameters come from home."""
    return [_best(task, plan, name) for name in plan.calls]


def _best(task: PlanningTask, plan: ExecutionPlan, name: str) -> Alternative:
    chosen = {call: [option_of(entry)] for call, entry in plan.calls.items()}
    planned = option_of(plan.calls[name])
    model = task.call_models[name]
    within = task.varied(offload=plan.offload)
    options = [planned, *(option for option in worthwhile(within, name) if option != planned)]
    native = native_problem(build_problem(within, {**chosen, name: options}))
    calls = task.graph.model_calls
    evaluations = [native.evaluate([number if call == name else 0 for call in calls]) for number in range(len(options))]
    found = list(zip(options[1:], evaluations[1:], strict=True))
    own = Layout(planned.layout.mesh, msgspec.structs.replace(planned.layout.strategy, micro_dp=(1, 1)))
    fitting = [
        (each["step_time"], option)
        for option, each in found
        if each["feasible"] and option.layout not in (planned.layout, own)
    ]
    best_s, best = min(fitting, key=lambda entry: entry[0], default=(float("inf"), None))
    return Alternative(
        call=name,
        option=best.call_plan(predicted_s=model.under(best.compute).seconds(*best.shape)) if best else None,
        step_s=best_s,
        planned_step_s=evaluations[0]["step_time"],
        num_layouts=num_layouts(within, name) - 1,
        num_too_large=num_layouts(within, name) - 1 - len({option.layout for _, option in fitting}),
        worth=tuple(
            Worth(
                of=name,
                feature=feature,
                without_s=min(
                    (each["step_time"] for option, each in found if each["feasible"] and lacks(option)), default=None
                ),
            )
            for feature, lacks in _features(planned).items()
        ),
    )


def _features(planned: Option) -> dict[str, Callable[[Option], bool]]:
    """By its name each feature that a plan chose for a call, with a test for options that lack it."""
    found: dict[str, Callable[[Option], bool]] = {}
    if planned.layout.strategy.chunks > 1:
        found[f"{planned.layout.strategy.chunks} chunks"] = lambda option: option.layout.strategy.chunks == 1
    for field, value in planned.compute.chosen.items():
        if field == "prefetch" and isinstance(planned.compute.data_parallel, tuple):
            continue  # chosen with the modes
        only = CallCompute(**{field: value})  # type: ignore[arg-type]  # one of its own fields
        found[str(only)] = partial(_lacks, field, value)
    return found


def _lacks(field: str, value: object, option: Option) -> bool:
    """Other modes of operators are no lack of them, nor is another number of layers, or of tokens, one of that
    choice."""
    other = getattr(option.compute, field)
    if field in ("recomputed_layers", "kv_cache_tokens"):
        return other is None
    return not isinstance(other, tuple) if isinstance(value, tuple) else bool(other != value)


def offload_worth(task: PlanningTask, prediction: Prediction) -> list[Worth]:
    """The gain from each model of the plan's `offload` that waits in host memory."""
    plan, found = prediction.plan, []
    for model in plan.offload:
        rest = tuple(other for other in plan.offload if other != model)
        there = predict_in_best_order(task, msgspec.structs.replace(plan, offload=rest, order=()))
        without_s = there.step_s if there.fits else None
        found.append(Worth(of=model, feature="waits in host memory", without_s=without_s))
    return found


def staleness_worth(result: SearchResult) -> list[Worth]:
    """The gain from each step of staleness that a search chose for rollouts, over the best plan found with less."""
    return [
        Worth(
            of="rollouts",
            feature=f"by weights {updates_text(result.plan.staleness)} old, not {fresher}",
            without_s=step_s,
        )
        for fresher, step_s in result.fresher.items()
    ]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A plan, the search that found it (None: it was given), and the heuristic plan.

    `worth`: the gain of each choice that the plan made of how calls compute, of models that wait in host memory, of
    copies that serve several calls, and of the staleness of rollouts. Where only the plan itself was asked for it has
    the staleness alone, and there are no `alternatives` and no `presets`, which are in their own order.
    All plans are re-priced in the same `draws`. `plain_step_s`: the plan's step without reproducible="layout", which it
    has; None where profiles do not tell it.
    """

    task: PlanningTask
    draws: "Draws"
    analysis: Analysis
    result: SearchResult | None
    heuristic: PresetResult
    presets: tuple[Candidate, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    worth: tuple[Worth, ...] = ()
    plain_step_s: float | None = None

    @property
    def plan(self) -> ExecutionPlan:
        return self.analysis.prediction.plan

    @cached_property
    def hinges(self) -> "list[Hinge]":
        """The constants that decide whether a plan by rule is faster than that of the search."""
        from realhf.planning.explain.hinges import hinges

        rules = self.result.rules if self.result else ()
        rivals = {rule.name: fitting for rule in rules if (fitting := rule.fitting)}
        return hinges(self.draws, self.analysis.prediction, rivals)

    @property
    def candidates(self) -> list[Candidate]:
        """The plan, and the presets."""
        problem = "" if self.result or self.analysis.prediction.fits else "memory"
        name = "searched" if self.result else "given"
        return [Candidate(name=name, analysis=self.analysis, problem=problem), *self.presets]

    @property
    def certificate(self) -> Certificate | None:
        return self.result.certificate if self.result else None

    @property
    def generates_apart(self) -> bool:
        """Whether some model generates and trains, and does not do both on any one device (disaggregated)."""
        calls = self.task.graph.model_calls.values()
        pairs = [
            (self.plan.calls[a.name].mesh, self.plan.calls[b.name].mesh)
            for a, b in product(calls, calls)
            if a.model_name == b.model_name and a.generates and b.trains
        ]
        return bool(pairs) and not any(generation.overlaps(training) for generation, training in pairs)


def describe(task: PlanningTask, plan: SearchResult | ExecutionPlan) -> Comparison:
    """The plan of a search, or a given one, beside the heuristic alone."""
    # numpy takes long to import, and the help of a command comes without it: so do `hinges`, `compare` and `sure`.
    from realhf.planning.intervals import drawn

    result = plan if isinstance(plan, SearchResult) else None
    task = task.of(plan.plan if isinstance(plan, SearchResult) else plan)
    prediction = plan.prediction if isinstance(plan, SearchResult) else predict(task, plan)
    known = {rule.name: rule for rule in result.rules} if result else {}
    heuristic, draws = known.get("heuristic") or evaluate_preset("heuristic", task), drawn(task)
    analysis = analyse(task, sure(draws, prediction))
    worth, plain_s = list(staleness_worth(result) if result else ()), plain_step_s(task, prediction.plan)
    if plain_s is not None:
        worth.append(Worth(of="all models", feature="reproducible='layout'", without_s=plain_s))
    return Comparison(
        task=task,
        draws=draws,
        analysis=analysis,
        result=result,
        heuristic=heuristic,
        worth=tuple(worth),
        plain_step_s=plain_s,
    )


def plain_step_s(task: PlanningTask, plan: ExecutionPlan) -> float | None:
    """Seconds of a step of the same plan without reproducible="layout"; None where models are not computed with it, or
    were not profiled in both ways."""
    costs, plain = task.costs, task.costs.plain
    if plain is None or not (costs.profiled and plain.profiled):
        return None
    plain = replace(plain, call_factors=costs.call_factors, changed_shares=costs.changed_shares)
    return predict(replace(task, costs=plain), plan).step_s


def sure(draws: "Draws", prediction: Prediction) -> Prediction:
    """With intervals in its plan."""
    from realhf.planning.intervals import intervals_of

    intervals = intervals_of(draws, prediction)
    return replace(prediction, plan=msgspec.structs.replace(prediction.plan, intervals=intervals))


def compare(alone: Comparison) -> Comparison:
    """With all presets, and with the best other layout of every call of the plan."""
    from realhf.planning.intervals import probability_faster

    task, draws, presets = alone.task, alone.draws, []
    planned = draws.of(alone.analysis.prediction)
    for preset in alone.result.rules if alone.result else evaluate_presets(task):
        analysis, slower = None, None
        if preset.prediction:
            analysis = analyse(task, sure(draws, preset.prediction))
            slower = probability_faster(planned, draws.of(preset.prediction))
        presets.append(Candidate(name=preset.name, analysis=analysis, problem=preset.problem, slower=slower))
    return replace(_explained(alone), presets=tuple(presets))


def _explained(alone: Comparison) -> Comparison:
    """Beside the plan of a search what it looked at; nothing, where there was no time for one."""
    task, prediction = alone.task, alone.analysis.prediction
    if alone.result and not alone.result.num_options:
        return alone
    is_everywhere = alone.certificate is not None and alone.certificate.num_meshes is None
    within = task.varied(breadth=alone.certificate.breadth) if alone.certificate and is_everywhere else task
    alternatives = tuple(best_alternatives(within, alone.plan))
    worth = [worth for alternative in alternatives for worth in alternative.worth]
    worth += [*offload_worth(task, prediction), *copies_worth(task, prediction), *alone.worth]
    return replace(alone, alternatives=alternatives, worth=tuple(worth))


def explain(alone: Comparison) -> ExecutionPlan:
    """The plan with its rationale."""
    task, result, simple = alone.task, alone.result, alone.heuristic
    origin = "given to the run"
    if result:
        options = " x ".join(map(str, result.num_options.values()))
        origin = "the best plan by rule; no time was left to search"
        if options:
            origin = f"the best of {result.evaluations:,} plans that a search looked at, out of {options} options"
    explained = _explained(alone)
    rationale = Rationale(
        origin=origin,
        hardware=task.cluster.hardware.name,
        profiled=task.costs.profiled,
        certificate=str(alone.certificate or ""),
        limits=alone.analysis.limits,
        heuristic_step_s=simple.prediction.step_s if simple.prediction else None,
        heuristic_fits=not simple.problem,
        device_memory_bytes=task.cluster.device_memory_bytes,
        memory=_memory(alone.analysis.prediction.needs),
        instead=tuple(map(_instead, explained.alternatives)),
        worth=explained.worth,
        preemptions=preemptions(task, alone.plan),
    )
    return msgspec.structs.replace(alone.plan, rationale=rationale)


def _memory(needs: list[DeviceNeed]) -> tuple[DeviceMemory, ...]:
    """Neighbouring devices with the same needs are one entry."""
    memory, first = [], 0
    for need, group in groupby(needs):
        devices = (first, len(list(group)))
        memory.append(DeviceMemory(devices=devices, **{name: round(size) for name, size in need._asdict().items()}))
        first = sum(devices)
    return tuple(memory)


def _instead(alternative: Alternative) -> Instead:
    option = alternative.option
    return Instead(
        call=alternative.call,
        layout=f"{option.layout}, {option.way_text}" if option else "",
        slower_by=alternative.slower_by if option else 0.0,
        num_too_large=alternative.num_too_large,
        num_others=alternative.num_layouts,
    )


def summary(comparison: Comparison) -> dict[str, Any]:
    """The comparison as data of `msgspec.to_builtins`; times in seconds, memory in bytes."""
    task, result = comparison.task, comparison.result
    certificate = asdict(result.certificate) if result else None
    if certificate:
        del certificate["feasible"]  # a search without a plan is an error
        for name in ("wider_s", "num_meshes"):  # only for large clusters
            if certificate[name] is None:
                del certificate[name]
    return {
        "cluster": {
            "hardware": task.cluster.hardware.name,
            "num_nodes": task.cluster.num_nodes,
            "devices_per_node": task.cluster.devices_per_node,
            "device_memory_bytes": task.cluster.device_memory_bytes,
        },
        "workload": {
            "batch_size": task.batch_size,
            "prompt_tokens": task.workload.prompt_tokens,
            "new_tokens": task.workload.new_tokens,
            "longest_response": task.workload.longest_response(task.batch_size),
            "tokens_per_step": task.tokens_per_step,
            "dtype": task.dtype,
        },
        "features": differences(task.costs.features),
        "certificate": certificate,
        "hinges": [asdict(hinge) for hinge in comparison.hinges],
        "search_trace": result.trace if result else (),
        "plans": [_candidate(task, candidate) for candidate in comparison.candidates],
        "alternatives": [
            asdict(alternative) | ({} if alternative.option else {"step_s": None})
            for alternative in comparison.alternatives
        ],
        "worth": comparison.worth,
    }


def _candidate(task: PlanningTask, candidate: Candidate) -> Mapping[str, Any]:
    analysis = candidate.analysis
    result: dict[str, Any] = {"name": candidate.name, "feasible": not candidate.problem, "problem": candidate.problem}
    if analysis is None:
        return result
    prediction = analysis.prediction
    return result | {
        "step_s": prediction.step_s,
        "step_interval_s": candidate.step_interval_s,
        "probability_slower": candidate.slower,
        "tokens_per_s": analysis.tokens_per_s,
        "gpu_hours_per_million_tokens": analysis.gpu_hours_per_million_tokens,
        "peak_bytes": prediction.peak_bytes,
        "device_bytes": prediction.device_bytes,
        "communicator_bytes": [need.communicator_bytes for need in prediction.needs],
        "longest_chain": analysis.chain,
        "busiest_device": analysis.busiest_device,
        "busy": analysis.busy,
        "plan": prediction.plan,
        "modes": task.modes(prediction.plan),
    }


def solve_cases(
    tasks: Mapping[str, PlanningTask], search: Callable[[PlanningTask], SearchResult]
) -> dict[str, Comparison | UserError]:
    """By name the best plan of each task, or why there is none: one search for each.

    Tasks on one cluster come in the order of their staleness: the plan of one counts for the next one, too, in the
    order that is the fastest there.
    """
    is_one_cluster = len({task.cluster for task in tasks.values()}) == 1
    results: dict[str, Comparison | UserError] = {}
    fresher = None
    for name, task in tasks.items():
        try:
            result = search(task)
        except UserError as error:
            results[name] = error
            continue
        if is_one_cluster and fresher:
            in_flight = task.max_steps_in_flight
            plan = msgspec.structs.replace(fresher, max_steps_in_flight=in_flight, predicted_step_s=None)
            # A copy may have the wrong version for another call where one of them is staler.
            known = with_best_copies(task, predict_in_best_order(task, with_sources(plan, {})))
            predictions = (result.prediction, known)
            result = replace(result, prediction=min(predictions, key=lambda each: each.step_s))
        fresher = result.plan
        results[name] = describe(task, result)
    return results
