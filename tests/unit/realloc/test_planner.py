"""Reallocation plans, carried out on numpy arrays: the right bytes, each once, within the buckets."""

import cProfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.architecture.compute import DataParallel
from realhf.architecture.model import DecoderConfig
from realhf.geometry.boxes import Box, device_boxes
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.shards import Placement, held_boxes
from realhf.realloc.execute.carriers import Message, broadcasts_of
from realhf.realloc.plan.cells import subtract
from realhf.realloc.plan.parcels import Load
from realhf.realloc.plan.planner import DeviceRound, MovedBy, ReallocationPlan, plan_between, plan_reallocation
from realhf.realloc.plan.rounds import Transfer
from tests.unit.realloc.layouts import global_state, layouts, models, network_bytes

Boxes = dict[int, list[Box]]


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + extent) for offset, extent in zip(box.offset, box.shape, strict=True))


def masks(state: dict[str, np.ndarray], boxes: list[Box]) -> dict[str, np.ndarray]:
    """Which element of every global parameter lies in one of `boxes`."""
    result = {name: np.zeros(array.shape, dtype=bool) for name, array in state.items()}
    for box in boxes:
        result[box.name][region(box)] = True
    return result


def check(plan: ReallocationPlan, state: dict[str, np.ndarray], source: Boxes, target: Boxes) -> None:
    """Runs the plan on arrays of global shape that hold 0 wherever a device has nothing."""
    held = {device: masks(state, source.get(device, [])) for device in {*source, *target}}
    wanted = {device: masks(state, target.get(device, [])) for device in {*source, *target}}
    got = {device: {name: np.zeros_like(array) for name, array in state.items()} for device in target}
    written = {device: {name: np.zeros_like(array) for name, array in state.items()} for device in target}
    for device, boxes in plan.local_copies.items():
        for box in boxes:
            assert held[device][box.name][region(box)].all()
            got[device][box.name][region(box)] = state[box.name][region(box)]
            written[device][box.name][region(box)] += 1
    arrived = {device: masks(state, []) for device in held}
    received = dict.fromkeys(target, 0)
    for transfers in plan.rounds:
        sending, receiving = dict.fromkeys(held, 0), dict.fromkeys(held, 0)
        assert transfers
        for transfer in transfers:
            device, has = transfer.target, arrived if transfer.is_forwarded else held
            for box in transfer.load.boxes:
                assert has[transfer.source][box.name][region(box)].all(), "a device sends what it does not have yet"
                assert not held[device][box.name][region(box)].any(), "a device receives what it holds"
                assert wanted[device][box.name][region(box)].all(), "a device receives what it does not want"
                got[device][box.name][region(box)] = state[box.name][region(box)]
                written[device][box.name][region(box)] += 1
                size_bytes = int(np.prod(box.shape)) * plan.element_bytes
                is_counted = transfer.broadcast and transfer.target != transfer.broadcast[1]  # a root sends once
                sending[transfer.source] += 0 if is_counted else size_bytes
                receiving[device] += size_bytes
                received[device] += size_bytes
        assert max(*sending.values(), *receiving.values()) <= plan.bucket_bytes
        for transfer in transfers:
            for box in transfer.load.boxes:
                arrived[transfer.target][box.name][region(box)] = True
    for device in target:
        for name, array in state.items():
            assert (got[device][name] == np.where(wanted[device][name], array, 0)).all()
            assert (written[device][name] == wanted[device][name]).all(), "an element arrives more than once"
    lacked = {
        device: sum(int((wanted[device][name] & ~held[device][name]).sum()) for name in state) * plan.element_bytes
        for device in target
    }
    assert received == lacked == plan.lacking_bytes
    assert plan.received_bytes == {device: size_bytes for device, size_bytes in lacked.items() if size_bytes}
    assert sum(plan.sent_bytes.values()) == sum(lacked.values())


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_layout_to_any_layout(data: st.DataObject) -> None:
    model = data.draw(models())
    a, b = data.draw(layouts(model)), data.draw(layouts(model))
    element_bytes = data.draw(st.sampled_from([2, 4, 8]))
    bucket_bytes = data.draw(st.sampled_from([7 * element_bytes, 100, 512, 2**20]))
    devices_per_node = data.draw(st.sampled_from([None, 1, 2, 4]))
    by: MovedBy = data.draw(st.sampled_from(["chains", "messages", "broadcasts"]))
    kinds: list[DataParallel] = [data.draw(st.sampled_from(["zero1", "fsdp"])) for _ in range(2)]
    plan = plan_between(model, *map(Placement, (a, b), kinds), devices_per_node, element_bytes, bucket_bytes, by)
    source = {device: held_boxes(model, a, device, kinds[0]) for device in a.mesh.devices}
    target = {device: held_boxes(model, b, device, kinds[1]) for device in b.mesh.devices}
    state = global_state(model)
    check(plan, state, source, target)
    check_broadcasts(plan, by)
    if by == "chains":
        assert network_bytes(plan, devices_per_node) == bytes_that_nodes_lack(
            state, source, target, devices_per_node, element_bytes
        )
    else:
        assert not any(transfer.is_forwarded for transfer in plan.transfers)


def check_broadcasts(plan: ReallocationPlan, by: MovedBy) -> None:
    """Every transfer is part of a broadcast to all of its group, or none is; a device has one of a round either way."""
    for transfers in plan.rounds:
        of_groups: dict[tuple[int, ...], list[Transfer]] = {}
        for transfer in transfers:
            of_groups.setdefault(transfer.broadcast, []).append(transfer)
        if by != "broadcasts":
            assert set(of_groups) == {()}
            continue
        for (root, *others), parts in of_groups.items():
            assert {(part.source, part.load) for part in parts} == {(root, parts[0].load)}
            assert [part.target for part in parts] == others == sorted(set(others))
        assert len({root for root, *_ in of_groups}) == len(of_groups)
        assert len({transfer.target for transfer in transfers}) == len(transfers)
    assert set(plan.groups) == {tuple(sorted(each.broadcast)) for each in plan.transfers if each.broadcast}
    assert carried_out_one_after_the_other(plan)


def carried_out_one_after_the_other(plan: ReallocationPlan) -> bool:
    """Whether all broadcasts end although each device has one at a time, and waits in it for all of its group: as over
    a host's memory, and on NCCL's streams. The order of a device is that of the messages that it posts."""
    queues: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    for device in {device for group in plan.groups for device in group}:
        rounds = [(each.index, messages_of(device, each)) for each in plan.rounds_of(device)]
        queues[device] = [
            (index, of_one[0].broadcast) for index, messages in rounds for of_one in broadcasts_of(messages)
        ]
    while any(queues.values()):
        ready = {queue[0] for queue in queues.values() if queue}
        ready = {(index, group) for index, group in ready if all(queues[d][:1] == [(index, group)] for d in group)}
        if not ready:
            return False
        for index, group in ready:
            for device in group:
                assert queues[device].pop(0) == (index, group)
    return True


def messages_of(device: int, each: DeviceRound) -> list[Message]:
    """In an order of its own, as `realhf.realloc.execute.locations` has them by peers."""
    sends = [Message("receive", peer, boxes, [], broadcast=each.sends_in) for peer, boxes in each.sends.items()]
    return sends + [
        Message("send", peer, boxes, [], broadcast=each.receives_in) for peer, boxes in each.receives.items()
    ]


def bytes_that_nodes_lack(
    state: dict[str, np.ndarray], source: Boxes, target: Boxes, devices_per_node: int | None, element_bytes: int
) -> int:
    """Of each node, the elements that a device of it wants and none of it holds: what has to come from elsewhere."""

    def elements(side: Boxes, node: int) -> dict[str, np.ndarray]:
        here = [box for device, boxes in side.items() if device // (devices_per_node or 1000) == node for box in boxes]
        return masks(state, here)

    total = 0
    for node in {device // (devices_per_node or 1000) for device in target}:
        wanted, held = elements(target, node), elements(source, node)
        total += sum(int((wanted[name] & ~held[name]).sum()) for name in state)
    return total * element_bytes


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
    return Box("p", offset, tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_boxes_of_no_layout(data: st.DataObject) -> None:
    """Sources that overlap in part, targets anywhere, one, two and three dimensions."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    source = {device: data.draw(st.lists(boxes(shape), max_size=2)) for device in range(4)}
    source[data.draw(st.integers(0, 5))] = [Box("p", (0,) * len(shape), shape)]  # somebody has all of it
    target = {device: [data.draw(boxes(shape))] for device in range(1, 6)}
    plan = plan_reallocation(source, target, 2, bucket_bytes=data.draw(st.integers(4, 100)))
    check(plan, {"p": np.arange(1, 1 + int(np.prod(shape))).reshape(shape)}, source, target)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_subtract(data: st.DataObject) -> None:
    shape = (4, 3, 5)
    outer = data.draw(boxes(shape))
    inner = data.draw(boxes(shape)).intersect(outer)
    if inner is None:
        return
    count = np.zeros(shape, dtype=int)
    for rest in subtract(outer, inner):
        count[region(rest)] += 1
    expected = np.zeros(shape, dtype=int)
    expected[region(outer)] = 1
    expected[region(inner)] = 0
    assert (count == expected).all()


def rows(start: int, end: int, name: str = "p") -> Box:
    return Box(name, (start,), (end - start,))


def transfer(source: int, target: int, box: Box) -> Transfer:
    return Transfer(source, target, Load((box,), box.size))


def test_two_to_three_worked_by_hand() -> None:
    """Halves of six rows on devices 0, 1 become thirds on devices 0, 1, 2."""
    source = {0: [rows(0, 3)], 1: [rows(3, 6)]}
    target = {0: [rows(0, 2)], 1: [rows(2, 4)], 2: [rows(4, 6)]}
    plan = plan_reallocation(source, target)
    assert plan.local_copies == {0: (rows(0, 2),), 1: (rows(3, 4),)}
    assert plan.rounds == ((transfer(0, 1, rows(2, 3)), transfer(1, 2, rows(4, 6))),)
    assert plan.lacking_bytes == {0: 0, 1: 4, 2: 8}
    assert plan.rounds_of(1)[0].receives == {0: (rows(2, 3),)}
    assert plan.rounds_of(1)[0].sends == {2: (rows(4, 6),)}


def test_nearest_source_first() -> None:
    everybody = {0: [rows(0, 8)], 3: [rows(0, 8)], 9: [rows(0, 8)]}
    plan = plan_reallocation(everybody, {2: [rows(0, 8)], 8: [rows(0, 8)], 3: [rows(0, 8)], 5: [rows(0, 8)]}, 2)
    sources = {transfer.target: transfer.source for transfer in plan.transfers}
    assert sources == {2: 3, 8: 9, 5: 0}  # 2 and 3, 8 and 9 share a node; 5 takes the idle device
    assert network_bytes(plan, 2) == 32


def test_replicas_share_the_sending() -> None:
    model = DecoderConfig(hidden_size=8, intermediate_size=12, num_layers=2, num_heads=4, num_kv_heads=4, vocab_size=12)
    source = Layout(DeviceMesh(0, 4), ParallelStrategy(dp=4))
    target = Layout(DeviceMesh(4, 4), ParallelStrategy(dp=4))
    sent = plan_between(model, Placement(source), Placement(target)).sent_bytes
    assert set(sent.values()) == {sum(sent.values()) // 4}
    assert set(sent) == {0, 1, 2, 3}


def test_a_single_holder_starts_a_chain() -> None:
    """One device to three others: each part leaves it once, and is forwarded while the next one comes."""
    source, target = {0: [rows(0, 4)]}, {device: [rows(0, 4)] for device in (1, 2, 3)}
    plan = plan_reallocation(source, target, bucket_bytes=8)
    assert [
        [(t.source, t.target, t.load.boxes[0].offset[0], t.is_forwarded) for t in each] for each in plan.rounds
    ] == [
        [(0, 1, 0, False)],
        [(1, 2, 0, True), (0, 3, 2, False)],
        [(2, 3, 0, True), (3, 1, 2, True)],
        [(3, 2, 2, True)],
    ]
    assert plan.sent_bytes == {0: 16, 1: 8, 2: 8, 3: 16}
    direct = plan_reallocation(source, target, bucket_bytes=8, by="messages")
    assert direct.sent_bytes == {0: 48}
    assert len(direct.rounds) == 6


def test_each_node_fetches_a_part_once_and_its_devices_take_turns() -> None:
    """Two nodes of two devices want what a third has: halves of four rows come in over different devices."""
    plan = plan_reallocation({0: [rows(0, 8)]}, {d: [rows(0, 8)] for d in (2, 3, 4, 5)}, 2, bucket_bytes=16)
    assert network_bytes(plan, 2) == 2 * 32
    assert sum(plan.lacking_bytes.values()) == 4 * 32
    fetched = {2: 0, 3: 0, 4: 0, 5: 0}
    for transfer in plan.transfers:
        fetched[transfer.target] += 4 * transfer.load.elements * (transfer.source // 2 != transfer.target // 2)
    assert fetched == {2: 16, 3: 16, 4: 16, 5: 16}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Layout(DeviceMesh(0, 1), ParallelStrategy()), Layout(DeviceMesh(0, 8), ParallelStrategy(dp=8))),
        (Layout(DeviceMesh(0, 2), ParallelStrategy(tp=2)), Layout(DeviceMesh(2, 6), ParallelStrategy(dp=3, tp=2))),
        (Layout(DeviceMesh(0, 4), ParallelStrategy(dp=2, pp=2)), Layout(DeviceMesh(4, 4), ParallelStrategy(dp=4))),
        (Layout(DeviceMesh(0, 2), ParallelStrategy(pp=2)), Layout(DeviceMesh(0, 8), ParallelStrategy(dp=4, pp=2))),
    ],
)
def test_with_chains_no_device_sends_much_more_than_the_bound(source: Layout, target: Layout) -> None:
    """The bound of each pair: what the worst device lacks, or an equal share of what somebody lacks for each that
    sends it first, whichever is more; within the largest parameter of it (embeddings of two and of one stage)."""
    model = DecoderConfig(
        hidden_size=16, intermediate_size=32, num_layers=8, num_heads=4, num_kv_heads=4, vocab_size=16
    )
    plan = plan_between(model, Placement(source), Placement(target), bucket_bytes=512)
    state = global_state(model)
    wanted_by_somebody = 4 * sum(array.size for array in state.values())
    bound = max(*plan.lacking_bytes.values(), wanted_by_somebody / source.mesh.size)
    assert max(plan.sent_bytes.values()) <= bound + 4 * max(array.size for array in state.values())


def test_equal_layouts_move_nothing() -> None:
    model = DecoderConfig(hidden_size=8, intermediate_size=12, num_layers=3, num_heads=4, num_kv_heads=4, vocab_size=12)
    layout = Layout(DeviceMesh(2, 4), ParallelStrategy(tp=2, pp=2))
    plan = plan_between(model, Placement(layout), Placement(layout))
    assert plan.rounds == ()
    assert sum(plan.lacking_bytes.values()) == 0
    assert plan.local_copies == {device: tuple(device_boxes(model, layout, device)) for device in range(2, 6)}


def test_plan_does_not_depend_on_the_order_of_the_tables_and_is_cached() -> None:
    model = DecoderConfig(
        hidden_size=12, intermediate_size=12, num_layers=3, num_heads=6, num_kv_heads=6, vocab_size=12
    )
    a = Layout(DeviceMesh(0, 6), ParallelStrategy(dp=1, tp=3, pp=2))
    b = Layout(DeviceMesh(2, 4), ParallelStrategy(dp=2, tp=2, pp=1))
    source = {device: device_boxes(model, a, device) for device in reversed(a.mesh.devices)}
    target = {device: device_boxes(model, b, device) for device in reversed(b.mesh.devices)}
    ends = Placement(a), Placement(b)
    assert plan_reallocation(source, target, 4, bucket_bytes=256) == plan_between(model, *ends, 4, 4, 256)
    assert plan_between(model, *ends, 4) is plan_between(model, *ends, 4)


def test_rounds_fill_buckets_side_by_side() -> None:
    """Two pairs of devices that have nothing to do with each other share the rounds."""
    source = {0: [rows(0, 8, "a")], 1: [rows(0, 8, "b")]}
    target = {2: [rows(0, 8, "a")], 3: [rows(0, 8, "b")]}
    plan = plan_reallocation(source, target, bucket_bytes=16)
    assert plan.rounds == (
        (transfer(0, 2, rows(0, 4, "a")), transfer(1, 3, rows(0, 4, "b"))),
        (transfer(0, 2, rows(4, 8, "a")), transfer(1, 3, rows(4, 8, "b"))),
    )


def test_what_nobody_holds_is_named() -> None:
    with pytest.raises(ValueError, match=r"p: no source device holds the part of shape \(2,\) at offset \(4,\)"):
        plan_reallocation({0: [rows(0, 4)]}, {1: [rows(0, 6)]})
    lm = DecoderConfig(hidden_size=8, intermediate_size=12, num_layers=1, num_heads=4, num_kv_heads=4, vocab_size=12)
    layout = Layout(DeviceMesh(0, 1), ParallelStrategy())
    with pytest.raises(ValueError, match=r"score\.weight"):
        plan_reallocation({0: device_boxes(lm, layout, 0)}, {0: device_boxes(lm.with_head("scalar"), layout, 0)})


def test_what_tensor_parallelism_does_not_divide_loses_no_row() -> None:
    model = DecoderConfig(hidden_size=8, intermediate_size=12, num_layers=1, num_heads=4, num_kv_heads=4, vocab_size=6)
    halves = (device_boxes(model, Layout(DeviceMesh(0, 2), ParallelStrategy(tp=2)), device)[0] for device in (0, 1))
    assert [(box.offset, box.shape) for box in halves] == [((0, 0), (3, 8)), ((3, 0), (3, 8))]
    four = Layout(DeviceMesh(0, 4), ParallelStrategy(tp=4))
    with pytest.raises(ValueError, match=r"tp=4 .* dimension 0 of model\.embed_tokens\.weight, .* 6; choose a divisor"):
        device_boxes(model, four, 1)


def test_overlapping_targets_and_tiny_buckets_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        plan_reallocation({0: [rows(0, 6)]}, {1: [rows(0, 4), rows(3, 6)]})
    with pytest.raises(ValueError, match="bucket_bytes=2"):
        plan_reallocation({0: [rows(0, 6)]}, {1: [rows(0, 4)]}, bucket_bytes=2)


def test_a_later_round_does_not_keep_earlier_ones_from_being_filled() -> None:
    """Device 1 is busy receiving in the first round; what device 0 sends elsewhere meanwhile still starts in it."""
    source = {0: [rows(0, 2, "b"), rows(0, 2, "c")], 2: [rows(0, 8, "a")]}
    target = {1: [rows(0, 8, "a"), rows(0, 2, "b")], 3: [rows(0, 2, "c")]}
    plan = plan_reallocation(source, target, bucket_bytes=16)
    assert [[(t.source, t.target, t.load.boxes[0].name) for t in transfers] for transfers in plan.rounds] == [
        [(2, 1, "a"), (0, 3, "c")],
        [(0, 1, "b")],
        [(2, 1, "a")],
    ]


def test_broadcasts_by_hand() -> None:
    """Each half has two holders, one on each node: from there it goes to the devices of the node, in loads of 8
    bytes."""
    first, second = rows(0, 4), rows(4, 8)
    source = {0: [first], 1: [second], 4: [first], 5: [second]}
    plan = plan_reallocation(source, {d: [rows(0, 8)] for d in (0, 2, 3, 6)}, 4, bucket_bytes=8, by="broadcasts")
    assert plan.groups == ((0, 2, 3), (4, 6), (0, 1, 2, 3), (5, 6))
    first_half, second_half = [(0, 2, 3), (4, 6)], [(1, 0, 2, 3), (5, 6)]
    assert [list(dict.fromkeys(each.broadcast for each in one)) for one in plan.rounds] == 2 * [first_half, second_half]
    assert {each.load.elements for each in plan.transfers} == {2}
    assert [(each.sends_in, each.receives_in) for each in plan.rounds_of(0)] == 2 * [
        ((0, 2, 3), ()),
        ((), (1, 0, 2, 3)),
    ]
    assert [each.moved_elements for each in plan.rounds_of(0)] == [2, 2, 2, 2]
    assert (plan.sent_bytes[0], plan.received_bytes[0]) == (32, 16)


def test_a_parcel_of_several_loads_keeps_its_way() -> None:
    """2,048 elements in buckets of two: four loads a parcel, each forwarded while the next one comes."""
    source, target = {0: [rows(0, 2048)]}, {device: [rows(0, 2048)] for device in (1, 2, 3)}
    plan = plan_reallocation(source, target, bucket_bytes=8)
    check(plan, {"p": np.arange(1, 2049)}, source, target)
    senders: dict[tuple[int, int], set[int]] = {}
    for transfer in plan.transfers:
        assert transfer.load.elements == 2
        senders.setdefault((transfer.load.boxes[0].offset[0] // 8, transfer.target), set()).add(transfer.source)
    assert {len(of_parcel) for of_parcel in senders.values()} == {1}
    assert max(plan.sent_bytes.values()) <= 1.02 * 4 * 2048
    assert len(plan.rounds) <= 1.2 * 1024


LLAMA_70B = DecoderConfig(
    hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, num_kv_heads=8, vocab_size=128256
)


@pytest.mark.parametrize(
    ("source", "target", "data_parallel"),
    [
        (ParallelStrategy(dp=8, tp=8, pp=2), ParallelStrategy(dp=32, tp=4, pp=1), "zero1"),
        (ParallelStrategy(dp=2, tp=4, pp=16), ParallelStrategy(dp=16, tp=8, pp=1), "zero1"),
        (ParallelStrategy(dp=8, tp=8, pp=2), ParallelStrategy(dp=16, tp=8, pp=1), "fsdp"),
    ],
    ids=str,
)
def test_a_70b_model_on_128_devices_is_little_work_to_plan(
    source: ParallelStrategy, target: ParallelStrategy, data_parallel: DataParallel
) -> None:
    """Counted in function calls, which do not depend on the machine: a million take less than a second anywhere.
    And what makes it little: hardly more transfers than buckets to be received, still shared evenly."""
    a, b = (Layout(DeviceMesh(0, 128), strategy) for strategy in (source, target))
    profile = cProfile.Profile()
    plan = profile.runcall(plan_between.__wrapped__, LLAMA_70B, Placement(a, data_parallel), Placement(b), 8, 2)
    calls = sum(entry.callcount for entry in profile.getstats())
    assert calls < 2_000_000
    most_lacking = max(plan.lacking_bytes.values())
    buckets = sum(-(-size_bytes // plan.bucket_bytes) for size_bytes in plan.lacking_bytes.values())
    assert sum(map(len, plan.rounds)) < 1.3 * buckets
    assert len(plan.rounds) < 1.3 * most_lacking / plan.bucket_bytes
    assert max(plan.sent_bytes.values()) < 1.05 * most_lacking
