"""From boxes to messages, worked by hand: cells, parcels, broadcasts, rounds."""

import pytest

from realhf.architecture.model import DecoderConfig
from realhf.geometry.boxes import Box
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.shards import Placement
from realhf.realloc.plan import cells
from realhf.realloc.plan.broadcast_chain import BroadcastChains, node_of
from realhf.realloc.plan.cells import Cell, cells_of
from realhf.realloc.plan.parcels import Load, Parcel, parcels_of
from realhf.realloc.plan.planner import DeviceRound, plan_between, plan_reallocation
from realhf.realloc.plan.rounds import Rounds, Transfer
from tests.unit.realloc.layouts import network_bytes


def rows(start: int, end: int, name: str = "p") -> Box:
    return Box(name, (start,), (end - start,))


def table(top: int, bottom: int, left: int, right: int, name: str = "p") -> Box:
    return Box(name, (top, left), (bottom - top, right - left))


def load(elements: int) -> Load:
    return Load((rows(0, elements),), elements)


# --- cells


def test_cells_are_cut_where_the_holders_change() -> None:
    source = {8: [rows(0, 4)], 1: [rows(2, 6)], 2: [rows(2, 6)]}
    target = {5: [rows(1, 6)], 2: [rows(1, 6)], 0: [rows(4, 5)]}
    assert list(cells_of(source, target)) == [
        Cell(rows(4, 5), holders=(1, 2), lacking=(0,), keeping=()),
        Cell(rows(1, 2), holders=(8,), lacking=(2, 5), keeping=()),
        Cell(rows(2, 4), holders=(1, 2, 8), lacking=(5,), keeping=(2,)),
        Cell(rows(4, 6), holders=(1, 2), lacking=(5,), keeping=(2,)),
    ]


def test_devices_with_a_box_among_others_are_in_ascending_order() -> None:
    source = {4: [rows(0, 2), rows(2, 3)], 8: [rows(0, 2)], 1: [rows(0, 2), rows(0, 1, "q")], 6: [rows(0, 2)]}
    target = {9: [rows(0, 2), rows(0, 1, "q")], 6: [rows(0, 2)], 7: [rows(0, 2)]}
    assert list(cells_of(source, target)) == [
        Cell(rows(0, 2), holders=(1, 4, 6, 8), lacking=(7, 9), keeping=(6,)),
        Cell(rows(0, 1, "q"), holders=(1,), lacking=(9,), keeping=()),
    ]


def test_parameters_that_are_divided_alike_keep_their_names_and_others_their_cells() -> None:
    source = {0: [rows(0, 2, "a"), rows(0, 2, "b"), rows(0, 4, "c")], 1: [rows(2, 4, "a"), rows(2, 4, "b")]}
    target = {2: [rows(0, 4, "a"), rows(0, 4, "b"), rows(0, 4, "c")]}
    assert [(cell.box, cell.holders) for cell in cells_of(source, target)] == [
        (rows(0, 2, "a"), (0,)),
        (rows(2, 4, "a"), (1,)),
        (rows(0, 2, "b"), (0,)),
        (rows(2, 4, "b"), (1,)),
        (rows(0, 4, "c"), (0,)),
    ]


def test_what_is_divided_alike_is_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of a model are many, and their cells differ in the name alone."""
    cut: list[str] = []
    cells_of_box = cells._cells
    monkeypatch.setattr(cells, "_cells", lambda box, *others: cut.append(box.name) or cells_of_box(box, *others))
    names = ("a", "b", "c", "d")
    source = {0: [rows(0, 2, name) for name in names], 1: [rows(2, 4, name) for name in names]}
    target = {2: [rows(0, 4, name) for name in names[:3]] + [rows(0, 3, "d")]}
    assert len(list(cells_of(source, target))) == 8
    assert cut == ["a", "d"]


def test_cells_of_a_table_are_in_the_order_of_their_places() -> None:
    found = cells_of({0: [table(0, 4, 0, 4)], 1: [table(1, 3, 1, 3)]}, {2: [table(0, 4, 0, 4)]})
    assert [(cell.box, cell.holders) for cell in found] == [
        (table(0, 1, 0, 4), (0,)),
        (table(1, 3, 0, 1), (0,)),
        (table(1, 3, 1, 3), (0, 1)),
        (table(1, 3, 3, 4), (0,)),
        (table(3, 4, 0, 4), (0,)),
    ]


def test_the_first_device_whose_targets_overlap_is_named_with_both() -> None:
    wanted = [rows(0, 2), rows(2, 4), rows(3, 6)]
    with pytest.raises(ValueError, match=r"^device 3 wants .*\(3,\).* and .*\(2,\).*, which overlap; target"):
        list(cells_of({0: [rows(0, 6)]}, {7: wanted, 3: wanted, 1: [rows(0, 6)]}))
    again = [rows(0, 4), rows(2, 6)]  # sources may overlap
    assert len(list(cells_of({0: again}, {1: [rows(0, 6)]}))) == 3


# --- parcels


def sizes(parcels: list[Parcel]) -> list[list[list[int]]]:
    for parcel in parcels:
        for each in parcel.loads:
            assert each.elements == sum(box.size for box in each.boxes)
    return [[[box.size for box in each.boxes] for each in parcel.loads] for parcel in parcels]


WAY = ((0,), (1,))


@pytest.mark.parametrize(
    ("device_elements", "boxes", "expected"),
    [
        # With little to receive every box is a parcel of its own.
        (255, (4, 4, 2), [[[4]], [[4]], [[2]]]),
        # Of 1,536 elements a parcel has 6 or more, of 1,535 it has 5; a load has at most 10.
        (1536, (5, 5, 5), [[[5, 5]], [[5]]]),
        (1535, (5, 5, 5), [[[5]], [[5]], [[5]]]),
        (1536, (3, 3, 3, 3, 1), [[[3, 3]], [[3, 3]], [[1]]]),
        (1536, (2, 9, 4), [[[2, 8]], [[1, 4]]]),
        (1536, (10, 10), [[[10]], [[10]]]),
        (1536, (23,), [[[10]], [[10]], [[3]]]),
        # 25 elements: two loads of 10 each. 20: two; 19: one.
        (256 * 25, (50,), [[[10], [10]], [[10], [10]], [[10]]]),
        (256 * 20, (30,), [[[10], [10]], [[10]]]),
        (256 * 20 - 1, (30,), [[[10]], [[10]], [[10]]]),
        (256 * 25, (4, 4, 4), [[[4, 4, 2], [2]]]),
    ],
)
def test_boxes_are_put_together_into_parcels(
    device_elements: int, boxes: tuple[int, ...], expected: list[list[list[int]]]
) -> None:
    ends = [sum(boxes[: place + 1]) for place in range(len(boxes))]
    given = [rows(end - size, end) for size, end in zip(boxes, ends, strict=True)]
    parcels = parcels_of({WAY: given}, device_elements, most_elements=10)
    assert sizes(parcels) == expected
    assert [parcel.elements for parcel in parcels] == [sum(map(sum, one)) for one in expected]
    assert {(parcel.holders, parcel.lacking) for parcel in parcels} == {WAY}
    place = 0
    for parcel in parcels:
        for each in parcel.loads:
            for box in each.boxes:
                assert box.offset == (place,), "boxes keep their order"
                place += box.size


def test_tables_are_cut_by_rows_and_rows_where_they_are_too_large() -> None:
    # 3 elements, then two rows of 9: neither fits beside the 3, and both not together.
    parcels = parcels_of({WAY: [rows(0, 3, "a"), table(0, 2, 0, 9)]}, 1536, most_elements=10)
    assert [each.boxes for parcel in parcels for each in parcel.loads] == [
        (rows(0, 3, "a"),),
        (table(0, 1, 0, 9),),
        (table(1, 2, 0, 9),),
    ]
    # Four rows of 3: three fit into 10 with an element of the last, two beside 3 others.
    parcels = parcels_of({WAY: [table(4, 8, 0, 3)]}, 256 * 10, most_elements=10)
    assert [each.boxes for parcel in parcels for each in parcel.loads] == [
        (table(4, 7, 0, 3), table(7, 8, 0, 1)),
        (table(7, 8, 1, 3),),
    ]
    parcels = parcels_of({WAY: [rows(0, 3, "a"), table(4, 8, 0, 3)]}, 256 * 10, most_elements=10)
    assert [each.boxes for parcel in parcels for each in parcel.loads] == [
        (rows(0, 3, "a"), table(4, 6, 0, 3)),
        (table(6, 8, 0, 3),),
    ]
    # Rows of 25, from the 5th column on.
    parcels = parcels_of({WAY: [table(1, 3, 5, 30)]}, 256 * 10, most_elements=10)
    assert [each.boxes for parcel in parcels for each in parcel.loads] == [
        (table(1, 2, 5, 15),),
        (table(1, 2, 15, 25),),
        (table(1, 2, 25, 30), table(2, 3, 5, 10)),
        (table(2, 3, 10, 20),),
        (table(2, 3, 20, 30),),
    ]


def test_parcels_of_different_ways_alternate() -> None:
    ways = {((0,), (1,)): [rows(0, 30, "a")], ((2,), (1, 3)): [rows(0, 10, "b")]}
    parcels = parcels_of(ways, 256 * 10, most_elements=10)
    assert [(parcel.holders, parcel.lacking) for parcel in parcels] == [
        ((0,), (1,)),
        ((2,), (1, 3)),
        ((0,), (1,)),
        ((0,), (1,)),
    ]


# --- broadcasts


def messages(
    chains: BroadcastChains,
    *parcels: tuple[int, tuple[int, ...], tuple[int, ...]],
    waiting: dict[int, int] | None = None,
) -> list[list[tuple[int, int]]]:
    """The (sender, receiver) of each parcel (bytes, holders, lacking). waiting: bytes of parcels that come later, by
    the device that holds them."""
    for size_bytes, holders, _ in parcels:
        chains.expect(size_bytes, holders)
    for device, size_bytes in (waiting or {}).items():
        chains.expect(size_bytes, (device,))
    return [list(chains.hops(*parcel)) for parcel in parcels]


def test_a_chain_of_forwarders_behind_a_single_holder() -> None:
    parcel = (8, (0,), (1, 2, 3))
    assert messages(BroadcastChains(None, True), parcel) == [[(0, 1), (1, 2), (2, 3)]]
    assert messages(BroadcastChains(None, False), parcel) == [[(0, 1), (0, 2), (0, 3)]]


def test_what_a_device_has_still_to_send_of_its_own_is_counted() -> None:
    """Half of what devices 1 and 2 both hold is 1's, in whole bytes. Device 0 has sent 5."""
    for of_both, sender in ((8, 1), (9, 1), (12, 0)):
        chains = BroadcastChains(None, True)
        chains.expect(of_both, (1, 2))
        assert messages(chains, (5, (0,), (3,)), (2, (0, 1), (3,))) == [[(0, 3)], [(sender, 3)]]


def test_what_a_device_need_not_send_any_more_is_not_counted() -> None:
    """Device 0 sends 20 that 1 could have sent too. Then 1 has nothing to do, or 4 bytes of its own."""
    parcels = ((20, (0, 1), (2,)), (2, (1, 3), (2,)))
    assert messages(BroadcastChains(None, True), *parcels, waiting={3: 5}) == [[(0, 2)], [(1, 2)]]
    assert messages(BroadcastChains(None, True), *parcels, waiting={1: 4}) == [[(0, 2)], [(3, 2)]]


def test_forwarding_pays_where_the_holder_sends_more_than_the_receiver_receives() -> None:
    """Device 2 has got 16 bytes from another: one more round is worth it only for more."""
    for size_bytes, sender in ((16, 0), (17, 1)):
        found = messages(BroadcastChains(None, True), (16, (5,), (2,)), (size_bytes, (0,), (1, 2)))
        assert found == [[(5, 2)], [(0, 1), (sender, 2)]]


def test_the_devices_of_a_node_take_turns_to_fetch() -> None:
    parcel = (8, (0,), (2, 3))
    assert messages(BroadcastChains(2, True), parcel, parcel, (8, (0,), (3, 2))) == [
        [(0, 2), (2, 3)],
        [(0, 3), (3, 2)],
        [(0, 2), (2, 3)],
    ]
    # What a device has fetched alone counts too.
    assert messages(BroadcastChains(2, True), (8, (0,), (2,)), parcel) == [[(0, 2)], [(0, 3), (3, 2)]]
    # A device that has to send much of its own fetches later.
    assert messages(BroadcastChains(2, True), parcel, waiting={2: 6}) == [[(0, 3), (3, 2)]]


def test_a_holder_of_the_node_is_asked_before_others_and_any_where_there_is_none() -> None:
    parcel = (9, (0, 3, 6), (1, 2))
    assert messages(BroadcastChains(2, True), parcel, (9, (0, 3, 6), (4,))) == [[(0, 1), (3, 2)], [(6, 4)]]
    busy = messages(BroadcastChains(2, True), (9, (0, 3, 6), (2,)), (9, (0,), (2, 3)), waiting={3: 50})
    assert busy == [[(3, 2)], [(0, 2), (2, 3)]], "what came from the node itself is not counted as fetched"
    # Node 2 gets from node 1 what that has got: the holder has sent it once.
    assert messages(BroadcastChains(2, True), (8, (0,), (2, 4))) == [[(0, 2), (2, 4)]]
    assert messages(BroadcastChains(2, False), (8, (0,), (2, 3, 4))) == [[(0, 2), (0, 3), (0, 4)]]


def test_nodes_of_devices() -> None:
    assert [node_of(device, 4) for device in (0, 3, 4, 11)] == [0, 0, 1, 2]
    assert node_of(11, None) == 0


# --- rounds


def test_a_round_is_filled_to_a_sixteenth() -> None:
    """Of 32 elements: at 30 it counts as full, at 29 what fits goes into it."""
    rounds = Rounds(32)
    assert rounds.add(0, 1, [load(29)], None) == [0]
    assert rounds.add(0, 1, [load(4)], None) == [1]
    assert rounds.add(0, 1, [load(3)], None) == [0]
    assert rounds.add(0, 1, [load(1)], None) == [1]
    full = Rounds(32)
    assert full.add(0, 1, [load(30), load(2)], None) == [0, 1]
    summed = Rounds(32)
    assert summed.add(0, 1, [load(20), load(10), load(1)], None) == [0, 0, 1]
    small = Rounds(15)  # a sixteenth is less than an element: none is left over
    assert small.add(0, 1, [load(14), load(1), load(1)], None) == [0, 0, 1]


def test_the_buckets_of_both_devices_bound_a_round() -> None:
    rounds = Rounds(32)
    assert rounds.add(0, 1, [load(20)], None) == [0]
    assert rounds.add(2, 1, [load(20)], None) == [1], "device 1 has no room to receive"
    assert rounds.add(2, 3, [load(20)], None) == [0]
    assert rounds.add(1, 4, [load(20)], None) == [0], "what a device receives leaves room for what it sends"
    assert rounds.add(0, 4, [load(12), load(12)], None) == [0, 1]
    assert rounds.add(0, 5, [load(2)], None) == [1], "device 0 has sent 32 in the first round"
    assert rounds.transfers == [
        [Transfer(0, 1, load(20)), Transfer(2, 3, load(20)), Transfer(1, 4, load(20)), Transfer(0, 4, load(12))],
        [Transfer(2, 1, load(20)), Transfer(0, 4, load(12)), Transfer(0, 5, load(2))],
    ]


def test_a_load_is_sent_on_after_the_round_in_which_it_arrived() -> None:
    rounds = Rounds(32)
    assert rounds.add(1, 2, [load(20), load(8), load(13)], [0, 2, 0]) == [1, 3, 2]
    assert [[(each.load.elements, each.is_forwarded) for each in one] for one in rounds.transfers] == [
        [],
        [(20, True)],
        [(13, True)],
        [(8, True)],
    ]


# --- plans


def test_what_a_device_does_in_the_rounds_that_concern_it() -> None:
    """Two boxes of device 0 to 1 and on to 2, and one of 3 to 4, in buckets of 4 elements."""
    source = {0: [rows(0, 2, "a"), rows(0, 2, "b")], 3: [rows(0, 4, "c"), rows(0, 4, "d")]}
    target = {1: [rows(0, 2, "a"), rows(0, 2, "b")], 2: [rows(0, 2, "a"), rows(0, 2, "b")], 4: [rows(0, 4, "c")]}
    plan = plan_reallocation(source, target, element_bytes=2, bucket_bytes=8)
    a, b, c = rows(0, 2, "a"), rows(0, 2, "b"), rows(0, 4, "c")
    assert plan.rounds_of(3) == [DeviceRound(0, {4: (c,)}, {}, False)]
    assert plan.rounds_of(4) == [DeviceRound(0, {}, {3: (c,)}, False)]
    assert plan.rounds_of(5) == []
    assert [(each.index, each.sends, each.receives, each.forwards) for each in plan.rounds_of(0)] == [
        (0, {1: (a,), 2: (b,)}, {}, False)
    ]
    assert [(each.index, each.sends, each.receives, each.forwards) for each in plan.rounds_of(1)] == [
        (0, {}, {0: (a,)}, False),
        (1, {2: (a,)}, {2: (b,)}, True),
    ]
    assert (plan.element_bytes, plan.bucket_bytes) == (2, 8)
    assert plan.sent_bytes == {0: 8, 1: 4, 2: 4, 3: 8}
    assert plan.received_bytes == {1: 8, 2: 8, 4: 8}


def test_what_stays_where_it_is_keeps_nobody_from_sending() -> None:
    a, b = rows(0, 4, "a"), rows(0, 40, "b")
    plan = plan_reallocation({0: [a, b], 1: [a]}, {2: [a], 0: [b]})
    assert plan.rounds == ((Transfer(0, 2, Load((a,), 4)),),)
    assert plan.local_copies == {0: (b,)}
    assert plan.lacking_bytes == {2: 16, 0: 0}
    # What device 0 alone has to send elsewhere does: 160 bytes, beside 16 that device 1 has too.
    plan = plan_reallocation({0: [a, b], 1: [a]}, {2: [a], 3: [b]})
    assert plan.rounds == ((Transfer(1, 2, Load((a,), 4)), Transfer(0, 3, Load((b,), 40))),)


def test_the_device_that_receives_most_decides_how_much_goes_together() -> None:
    """2,563 elements in buckets of 10: a load is a whole bucket. Another device lacks 5, and has them in one."""
    a, b, c = rows(0, 3, "a"), rows(0, 2560, "b"), rows(0, 5, "c")
    plan = plan_reallocation({0: [a, b, c]}, {1: [a, b], 2: [c]}, bucket_bytes=40)
    first, *_ = [each.load.boxes for each in plan.transfers if each.target == 1]
    assert first == (a, rows(0, 7, "b"))
    assert [each.load.boxes for each in plan.transfers if each.target == 2] == [(c,)]


@pytest.mark.parametrize(("of_three", "sender"), [(3, 3), (5, 0)])
def test_senders_are_loaded_evenly_in_bytes(of_three: int, sender: int) -> None:
    """Device 1 is busy with e, so 0 sends the 16 bytes of a; then c goes from who has less to send: 0, or 3 with d."""
    a, c, d, e = rows(0, 4, "a"), rows(0, 1, "c"), rows(0, of_three, "d"), rows(0, 5, "e")
    plan = plan_reallocation({0: [a, c], 1: [a, e], 3: [c, d]}, {2: [a, c, d, e]})
    senders = {box.name: each.source for each in plan.transfers for box in each.load.boxes}
    assert senders == {"a": 0, "c": sender, "d": 3, "e": 1}


def test_boxes_of_one_pair_of_devices_in_one_round_are_together() -> None:
    source = {0: [rows(0, 2, "a"), rows(0, 2, "b"), rows(0, 2, "c")]}
    plan = plan_reallocation(source, {1: [rows(0, 2, name) for name in "abc"]}, element_bytes=2, bucket_bytes=8)
    a, b, c = (rows(0, 2, name) for name in "abc")
    assert plan.rounds_of(0) == [DeviceRound(0, {1: (a, b)}, {}), DeviceRound(1, {1: (c,)}, {})]
    assert plan.rounds_of(1) == [DeviceRound(0, {}, {0: (a, b)}), DeviceRound(1, {}, {0: (c,)})]


def test_buckets_hold_an_element_at_least_and_64_mebibytes_by_default() -> None:
    plan = plan_reallocation({0: [rows(0, 2)]}, {1: [rows(0, 2)]}, bucket_bytes=4)
    assert [len(transfers) for transfers in plan.rounds] == [1, 1]
    with pytest.raises(ValueError, match=r"bucket_bytes=3 cannot hold one element of 4 bytes; make it larger"):
        plan_reallocation({0: [rows(0, 2)]}, {1: [rows(0, 2)]}, bucket_bytes=3)
    plan = plan_reallocation({0: [rows(0, 2)]}, {1: [rows(0, 2)], 2: []}, 1)
    assert (plan.element_bytes, plan.bucket_bytes) == (4, 64 * 2**20)
    assert plan.lacking_bytes == {1: 8, 2: 0}
    assert plan_reallocation({0: [rows(0, 2)]}, {}).rounds == ()


def test_a_plan_between_layouts_has_what_it_is_asked_for() -> None:
    model = DecoderConfig(hidden_size=4, intermediate_size=4, num_layers=1, num_heads=2, num_kv_heads=2, vocab_size=4)
    one = Placement(Layout(DeviceMesh(0, 1), ParallelStrategy()))
    three = Placement(Layout(DeviceMesh(1, 3), ParallelStrategy(dp=3)))
    plan = plan_between(model, one, three)
    assert (plan.element_bytes, plan.bucket_bytes) == (4, 64 * 2**20)
    assert any(transfer.is_forwarded for transfer in plan.transfers)
    assert {transfer.target for transfer in plan.transfers} == {1, 2, 3}
    direct = plan_between(model, one, three, 2, 2, 64, False)
    assert (direct.element_bytes, direct.bucket_bytes) == (2, 64)
    assert {(transfer.source, transfer.is_forwarded) for transfer in direct.transfers} == {(0, False)}
    assert sum(direct.lacking_bytes.values()) * 2 == sum(plan.lacking_bytes.values())
    # Two of three copies leave the node of the devices 0 and 1.
    assert network_bytes(direct, 2) * 3 == sum(direct.lacking_bytes.values()) * 2


def test_sharded_parameters_are_planned_by_what_is_held() -> None:
    """Fully sharded over two devices each holds half, and with whole parameters all."""
    model = DecoderConfig(hidden_size=4, intermediate_size=4, num_layers=1, num_heads=2, num_kv_heads=2, vocab_size=4)
    both = Layout(DeviceMesh(0, 2), ParallelStrategy(dp=2))
    whole, sharded = Placement(both, "zero1"), Placement(both, "fsdp")
    assert sum(plan_between(model, whole, sharded).lacking_bytes.values()) == 0
    back = plan_between(model, sharded, whole)
    held = sum(box.size for boxes in back.local_copies.values() for box in boxes)
    assert sum(back.lacking_bytes.values()) == 4 * held > 0
    assert {(transfer.source, transfer.target) for transfer in back.transfers} == {(0, 1), (1, 0)}
