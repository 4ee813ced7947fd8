"""The values that calls compute with, compared by the sums of workers: under any layout, and with one bit changed."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from realhf.api.experiment import ModelSetup
from realhf.architecture.model import DecoderConfig
from realhf.base.digest import weights_digest
from realhf.base.errors import RunError
from realhf.dataflow.follow import Follow
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import CallPlan
from realhf.geometry.boxes import Box
from realhf.geometry.parameters import decoder_parameters
from realhf.geometry.shards import Placement, held_boxes
from realhf.master.loop import CallRecord
from realhf.master.state import Node
from realhf.master.weights import WeightsWatch
from realhf.models.checkpoint_index import state_owners
from realhf.realloc.execute.checksum import ParameterSums, bit_sum
from realhf.rundir.weights import SavedWeights, is_optimizer_state
from realhf.transport.messages import Reply, Span
from tests.unit.api.calls import call

TIED = DecoderConfig(
    hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=4, vocab_size=12, tied_embeddings=True
)
SHAPES = {spec.name: spec.shape for spec in decoder_parameters(TIED)}
Values = dict[str, torch.Tensor]
ALONE = CallPlan(devices=(0, 1))
MODES = (("layers.*.down", "1 sharded + 1 zero1"), ("layers.*.q", "replicated"))
PLANS = {
    "dp": CallPlan(devices=(0, 2), dp=2),
    "tp": CallPlan(devices=(2, 2), tp=2),
    "pp": CallPlan(devices=(0, 2), pp=2),
    "all": CallPlan(devices=(0, 8), dp=2, tp=2, pp=2),
}


def values(seed: int) -> Values:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def flipped(parameters: Values, name: str, place: tuple[int, ...] = ()) -> Values:
    """With one bit of one element changed."""
    changed = parameters[name].clone()
    changed.view(torch.int32)[place or (0,) * changed.dim()] ^= 1
    return parameters | {name: changed}


def sums(parameters: Values, placement: Placement, worker: int) -> tuple[int, ...]:
    """Those of a worker that has its parts of `parameters`."""
    boxes = held_boxes(TIED, placement.layout, worker, placement.data_parallel)
    parts = [
        (box, parameters[box.name][tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))].clone())
        for box in sorted(boxes, key=lambda box: (box.name, box.offset))
    ]
    return ParameterSums(parts, SHAPES)()


class Watched:
    """A run of two calls of the actor, and of a reference that may follow it."""

    def __init__(
        self, plan: CallPlan = ALONE, home: CallPlan = ALONE, follow: Follow | None = None, data_parallel: Any = "zero1"
    ):
        graph = DataflowGraph(
            [
                call("actor", GENERATE, ["prompt"], ["seq"], model_type=TIED),
                call("reference", INFERENCE, ["seq"], ["logprob"], model_type=TIED),
                call("actor", TRAIN_STEP, ["seq", "logprob"], model_type=TIED),
            ],
            ["prompt"],
            {"reference": follow} if follow else {},
        )
        self.plans = {"actor_generate": plan, "reference_inference": plan, "actor_train_step": home}
        self.homes = {"actor": home.layout, "reference": plan.layout}
        self.data_parallel = data_parallel
        run: Any = SimpleNamespace(
            experiment=SimpleNamespace(
                graph=graph,
                graphs={"train": graph, "evaluation": graph},
                setups=dict.fromkeys(graph.models, ModelSetup()),
            ),
            homes=self.homes,
            plan=SimpleNamespace(max_steps_in_flight=2),
            placement=self.placement,
            call_plan=lambda _, call: self.plans[call.name],
        )
        self.watch, self.graph = WeightsWatch(run), graph

    def placement(self, model: str) -> Placement:
        return Placement(self.homes[model], self.data_parallel if model == "actor" else "zero1")

    def record(
        self, name: str, step: int, used: Values, made: Values | None = None, of_workers: Mapping[int, Values] = {}
    ) -> CallRecord:
        """Workers that are not in `of_workers` have what all have."""
        layout, model = self.plans[name].layout, name.split("_")[0]
        placement = self.placement(model) if layout == self.homes[model] else Placement(layout)
        replies = {}
        for worker in layout.mesh.devices:
            own_made = of_workers.get(worker, made) if made else None
            replies[worker] = Reply(
                request_id=0,
                span=Span("compute", "", 0.0, 1.0),
                used_weights=sums(used if made else of_workers.get(worker, used), placement, worker),
                made_weights=sums(own_made, placement, worker) if own_made else (),
            )
        version, makes = self.graph.weights_version(model, step), step + 1 if made else None
        return CallRecord(Node(step, name), model, replies, version=version, makes=makes)

    def states(
        self, step: int, field: str, states: Values, of_workers: Mapping[int, Values] = {}, steps: Any = 7
    ) -> str:
        """The digest of optimizer states that workers have before or after the training of a step."""
        layout, replies = self.plans["actor_train_step"].layout, {}
        for worker in layout.mesh.devices:
            owned = state_owners(TIED, layout, "float32", self.data_parallel)[worker]
            parts = [
                (box, of_workers.get(worker, states)[box.name][box.slices_in(whole)].clone())
                for box in sorted(filter(is_optimizer_state, owned), key=lambda box: (box.name, box.offset))
                if (whole := Box(box.name, (0,) * len(box.shape), tuple(states[box.name].shape)))
            ]
            sums = ParameterSums(parts, {name: value.shape for name, value in states.items()})()
            number = steps if isinstance(steps, int) else steps[worker]
            reply = Reply(request_id=0, span=Span("compute", "", 0.0, 1.0))
            replies[worker] = msgspec.structs.replace(reply, **{f"{field}_states": (*sums, number)})
        record = CallRecord(Node(step, "actor_train_step"), "actor", replies, version=step, makes=step + 1)
        [digest] = self.watch.of_step("train", step, [record])["actor_train_step"].values()
        return digest

    def generated(self, step: int, used: Values, of_workers: Mapping[int, Values] = {}) -> str:
        record = self.record("actor_generate", step, used, of_workers=of_workers)
        return self.watch.of_step("train", step, [record])["actor_generate"]["weights"]

    def trained(self, step: int, used: Values, made: Values, of_workers: Mapping[int, Values] = {}) -> str:
        record = self.record("actor_train_step", step, used, made, of_workers)
        return self.watch.of_step("train", step, [record])["actor_train_step"]["new_weights"]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    "data_parallel", ["zero1", "fsdp", (("layers.*.down", "1 sharded + 1 zero1"), ("layers.*.q", "replicated"))]
)
def test_equal_values_have_one_digest_under_every_layout(name: str, data_parallel: Any) -> None:
    watched = Watched(PLANS[name], CallPlan(devices=(0, 4), dp=4), data_parallel=data_parallel)
    first, then = values(1), values(2)
    digest = watched.generated(0, first)
    assert len(digest) == 16
    assert digest == Watched().generated(0, first) != Watched().generated(0, then)
    after = watched.trained(0, first, then)
    assert after == watched.generated(1, then) != digest


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("parameter", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
def test_one_bit_in_a_copy_names_call_version_parameter_and_worker(name: str, parameter: str) -> None:
    watched = Watched(PLANS[name])
    first, then = values(1), values(2)
    watched.trained(0, first, then)
    wrong = flipped(then, parameter)
    everywhere = dict.fromkeys(PLANS[name].layout.mesh.devices, wrong)
    with pytest.raises(RunError) as caught:
        watched.generated(1, then, everywhere)
    assert str(caught.value).startswith(
        "actor_generate of step 2 has other values of actor than version 1 has, which the result of "
        f"actor_train_step of step 1 had: in {parameter}, on worker"
    )


def test_a_rank_that_differs_from_its_peers_is_named() -> None:
    watched = Watched(home=CallPlan(devices=(0, 4), dp=4))
    first, then = values(1), values(2)
    wrong = flipped(then, "model.layers.0.mlp.gate_proj.weight", (3, 2))
    with pytest.raises(RunError) as caught:
        watched.trained(0, first, then, {2: wrong})
    assert str(caught.value) == (
        "the result of actor_train_step of step 1: worker 2 has other values than workers 0, 1, 3 in version 1 "
        "of actor, in model.layers.0.mlp.gate_proj.weight, the part of shape (24, 16) at offset (0, 0); a memory or a "
        "link changed them: go on from the last checkpoint with --resume, without that machine if it happens again"
    )
    assert caught.value.workers == {2}


def test_of_two_ranks_the_one_that_changed_is_named() -> None:
    watched = Watched(PLANS["dp"], PLANS["dp"])
    first = values(1)
    watched.generated(0, first)
    with pytest.raises(RunError, match="worker 0 has other values than worker 1 in version 0") as caught:
        watched.generated(0, first, {0: flipped(first, "model.norm.weight")})
    assert "worker 0" in str(caught.value)
    with pytest.raises(RunError) as unknown:
        Watched(PLANS["dp"]).generated(0, first, {0: flipped(first, "model.norm.weight")})
    assert unknown.value.workers == {0, 1}, "either may be wrong"


def test_the_part_that_changed_at_home_names_its_worker() -> None:
    watched = Watched(home=PLANS["all"])
    first, then = values(1), values(2)
    watched.trained(0, first, then)
    name = "model.layers.0.self_attn.q_proj.weight"
    holders = [worker for worker in range(8) if any(
        box.name == name and box.offset[0] > 0 for box in held_boxes(TIED, PLANS["all"].layout, worker)
    )]  # fmt: skip
    wrong = flipped(then, name, (15, 0))
    with pytest.raises(RunError, match=f"in {name}, on workers {holders[0]}, {holders[1]};"):
        watched.watch.of_step("train", 1, [watched.record("actor_train_step", 1, wrong, values(3))])


def test_weights_of_the_step_before_are_noticed() -> None:
    watched = Watched(PLANS["tp"])
    first, then = values(1), values(2)
    watched.generated(0, first)
    watched.trained(0, first, then)
    with pytest.raises(RunError, match=r"and 19 more parameters, on workers 2, 3; .* or they are of another step"):
        watched.generated(1, first)


def test_a_copy_of_another_model_has_its_values() -> None:
    watched = Watched(follow=Follow("actor", eta=1.0))
    first, then = values(1), values(2)

    def referred(step: int, used: Values) -> dict[str, dict[str, str]]:
        return watched.watch.of_step("train", step, [watched.record("reference_inference", step, used)])

    referred(0, values(9))  # its own at the start
    watched.trained(0, first, then)
    with pytest.raises(RunError, match="reference_inference of step 2 has other values of reference than version 1"):
        referred(1, first)
    assert referred(1, then)["reference_inference"]["weights"] == watched.generated(1, then)


def test_an_average_has_values_of_its_own_which_stay() -> None:
    watched = Watched(follow=Follow("actor", eta=0.5, every_steps=2))
    watched.trained(0, values(1), values(2))
    watched.trained(1, values(2), values(3))  # whose second version the average is not
    for step, seed in ((0, 5), (1, 5), (2, 6), (3, 6)):
        watched.watch.of_step("train", step, [watched.record("reference_inference", step, values(seed))])
    with pytest.raises(RunError, match="than version 2 has, which reference_inference of step 3 had"):
        watched.watch.of_step("evaluation", 3, [watched.record("reference_inference", 3, values(7))])


def test_the_values_of_a_checkpoint_are_expected_after_it() -> None:
    before, then = Watched(PLANS["tp"]), values(2)
    before.trained(0, values(1), then)
    saved = before.watch.newest()
    whole = {name: int(bit_sum(tensor)) % 2**64 for name, tensor in then.items()}
    assert saved == {"actor": SavedWeights.of(1, "float32", whole)}
    for wrong in (flipped(then, "model.norm.weight"), then):
        after = Watched(PLANS["all"])
        after.watch.begin_with(saved, 1)
        if wrong is then:
            after.generated(1, wrong)
            continue
        with pytest.raises(RunError, match=r"which the checkpoint after step 1 had: in model\.norm"):
            after.generated(1, wrong)
    other_dtype = {"actor": SavedWeights.of(1, "bfloat16", saved["actor"].numbers()), "gone": saved["actor"]}
    another = Watched(PLANS["all"])
    another.watch.begin_with(other_dtype, 1)
    another.generated(1, values(3))


def test_sums_of_other_parts_than_a_worker_holds() -> None:
    watched = Watched()
    record = watched.record("actor_generate", 0, values(1))
    record.replies[0] = Reply(request_id=0, span=Span("compute", "", 0.0, 1.0), used_weights=(1, 2))
    with pytest.raises(RunError, match="worker 0 has summed up 2 parts of actor, and holds 20"):
        watched.watch.of_step("train", 0, [record])


def test_digest_by_hand() -> None:
    # blake2b with 8 bytes of [["a",1],["b",18446744073709551615]]
    assert weights_digest({"b": 2**64 - 1, "a": 1}) == weights_digest({"a": 1, "b": 2**64 - 1}) == "0a259e883b4064ae"
    saved = SavedWeights.of(3, "float32", {"a": 255})
    assert saved.sums == {"a": "00000000000000ff"}
    assert saved.numbers() == {"a": 255}


def moments(seed: int) -> Values:
    generator = torch.Generator().manual_seed(seed)
    kinds = ("exp_avg", "exp_avg_sq")
    return {
        f"{name}@{kind}": torch.randn(shape, generator=generator) for name, shape in SHAPES.items() for kind in kinds
    }


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("data_parallel", ["zero1", "fsdp", MODES])
def test_optimizer_states_have_one_digest_however_they_are_cut(name: str, data_parallel: Any) -> None:
    plan = CallPlan(devices=(0, 4), dp=4) if name == "dp" else PLANS[name]  # which cuts parameters anywhere
    watched, alone = Watched(home=plan, data_parallel=data_parallel), Watched()
    digest = watched.states(0, "made", moments(1))
    assert digest == alone.states(0, "made", moments(1)) != Watched().states(0, "made", moments(2))
    assert digest != Watched().states(0, "made", moments(1), steps=8), "the number of optimizer steps counts"
    assert digest == watched.states(1, "used", moments(1))
    saved = watched.watch.newest_states()["actor"]
    whole = {name: int(bit_sum(tensor)) % 2**64 for name, tensor in moments(1).items()}
    assert saved == SavedWeights.of(1, "float32", whole | {"the number of optimizer steps": 7})


def test_a_training_begins_with_the_states_of_the_one_before_it_or_of_the_checkpoint() -> None:
    then = moments(2)
    wrong = flipped(then, "model.layers.1.mlp.down_proj.weight@exp_avg_sq", (3, 2))
    before = Watched(home=PLANS["tp"])
    before.states(0, "made", then)
    after = Watched(home=PLANS["all"])
    after.watch.begin_with({}, 1, before.watch.newest_states())
    for watched, whose in (
        (before, "the result of actor_train_step of step 1"),
        (after, "the checkpoint after step 1"),
    ):
        with pytest.raises(RunError) as caught:
            watched.states(1, "used", wrong)
        assert str(caught.value).startswith(
            f"actor_train_step of step 2 has other values of actor than version 1 has, which {whose} had: in "
            "model.layers.1.mlp.down_proj.weight@exp_avg_sq, on worker"
        )
        watched.states(1, "used", then)
        watched.states(1, "made", wrong)  # a training makes others
    with pytest.raises(
        RunError, match=r"has other values than .* in version 3 of actor, in the number of optimizer steps"
    ):
        after.states(2, "made", then, steps=[1, *[2] * 7])
    other_dtype = {"actor": SavedWeights.of(1, "bfloat16", before.watch.newest_states()["actor"].numbers())}
    another = Watched()
    another.watch.begin_with({}, 1, other_dtype)
    another.states(1, "used", then)
