"""Units of parameters on one of two ranks, with a stand-in for the other: what is gathered, kept, lent and reduced."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from realhf.engine.train import divided, gathering
from realhf.engine.train.agreement import Point
from realhf.engine.train.divided import DividedParameters
from realhf.engine.train.gathering import GatheredUnit, Gathering
from realhf.geometry.boxes import Box
from realhf.geometry.shards import FlatLayout, Unit
from realhf.parallel.gradients import before_use, gradient_sink

ROWS, COLUMNS = 8, 16  # of a matrix, as many elements as two aligned shards have


class Group:
    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


class Peer:
    """Rank 1: its shards are threes; it adds 100 to what is reduced. `asks` has what it says in the next messages,
    made of what rank 0 says; by default the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.group, self.log, self.asks, self.waits = Group(), [], [], 0  # type: ignore[var-annotated]
        self.names: dict[int, str] = {}
        for module in (gathering, divided):
            monkeypatch.setattr(module, "reduce_scatter", self.reduce_scatter)
        monkeypatch.setattr(gathering, "start_all_gather", self.start_all_gather)
        monkeypatch.setattr(gathering, "all_gather_integers", self.all_gather_integers)
        monkeypatch.setattr(divided, "all_gather", lambda flat, group: self.start_all_gather(flat, group)[0].wait())
        monkeypatch.setattr(divided, "all_reduce", self.all_reduce)

    def start_all_gather(self, flat: Tensor, group: Any) -> list[Any]:
        assert group is self.group
        self.log.append(f"gather {self.name_of(flat)}")
        return [Work(self, flat), Work(self, None)]

    def reduce_scatter(self, flat: Tensor, group: Any) -> Tensor:
        assert group is self.group
        self.log.append("reduce")
        own = flat.chunk(2)[0]
        own += 100
        return own

    def all_reduce(self, flat: Tensor, group: Any) -> None:
        assert group is self.group
        self.log.append("all-reduce")
        flat += 100

    def all_gather_integers(self, numbers: list[int], group: Any, device: torch.device) -> list[list[int]]:
        assert (group, device.type) == (self.group, "cpu")
        said = self.asks.pop(0)(list(numbers)) if self.asks else list(numbers)
        return [list(numbers), said]

    def name_of(self, flat: Tensor) -> str:
        return self.names.get(flat.untyped_storage()._cdata, "a vector")


class Work:
    def __init__(self, peer: Peer, flat: Tensor | None) -> None:
        self.peer, self.flat = peer, flat

    def wait(self) -> None:
        self.peer.waits += 1
        if self.flat is not None:
            self.flat.chunk(2)[1].fill_(3.0)


def unit(name: str, mode: Any = "sharded", **shapes: tuple[int, ...]) -> Unit:
    shapes = shapes or {f"{name}.weight": (ROWS, COLUMNS)}
    boxes = {key: Box(key, (0,) * len(shape), shape) for key, shape in shapes.items()}
    return Unit(name, mode, FlatLayout(shapes, 2), boxes, name)


class Scale(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum() + (self.weight * self.weight).sum()


class Rank:
    """Some units named by letters, one module for each, called one after the other."""

    def __init__(self, peer: Peer, names: str, prefetch: bool = True) -> None:
        self.vectors = DividedParameters(
            [unit(name) for name in names], peer.group, 0, torch.float64, torch.device("cpu")
        )  # type: ignore[arg-type]
        self.vectors.flat.copy_(torch.arange(1, len(self.vectors.flat) + 1) / 1000)
        self.parameters = {name: nn.Parameter(view) for name, view in self.vectors.views().items()}
        self.vectors.connect(self.parameters, prefetch=prefetch)
        assert self.vectors.gathering is not None
        self.gathering: Gathering = self.vectors.gathering
        self.units = dict(zip(names, self.vectors.gathered.values(), strict=True))
        self.modules = [Scale(self.parameters[f"{name}.weight"]) for name in names]
        for name, module in zip(names, self.modules, strict=True):
            self.gathering.connect(module, [self.units[name]], backward=True)
            peer.names[self.units[name].arena.flat.untyped_storage()._cdata] = name

    def __call__(self, x: Tensor) -> Tensor:
        for module in self.modules:
            x = module(x)
        return x

    @property
    def there(self) -> str:
        """Units that have memory."""
        return "".join(name for name, of in self.units.items() if of.arena.flat.untyped_storage().nbytes())


def whole(rank: Rank, name: str) -> Tensor:
    return torch.cat([rank.units[name].shard, torch.full((64,), 3.0, dtype=torch.float64)]).view(ROWS, COLUMNS)


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Peer:
    return Peer(monkeypatch)


def expected_of(rank: Rank, names: str, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output with whole weights, and the gradients of its double."""
    weights = {name: whole(rank, name).requires_grad_() for name in names}
    for weight in weights.values():
        x = x * weight.sum() + (weight * weight).sum()
    gradients = torch.autograd.grad(2 * x, list(weights.values()))
    return x.detach(), dict(zip(weights, gradients, strict=True))


@pytest.mark.parametrize("prefetch", [True, False])
def test_units_are_there_for_their_use_and_their_gradients_are_summed(peer: Peer, prefetch: bool) -> None:
    """With one in advance from the second time on; at most two, or one, have memory."""
    rank = Rank(peer, "abc", prefetch)
    rank.vectors.attach_gradients(torch.float64)
    x = torch.tensor(0.5, dtype=torch.float64)
    output, gradients = expected_of(rank, "abc", x)
    seen: list[str] = []
    forward = ["gather a", "gather b", "gather c"]
    for module in rank.modules:
        module.register_forward_pre_hook(lambda *_: seen.append(rank.there))
    for pass_number in range(3):
        peer.log.clear()
        rank.vectors.zero_gradients()
        with rank.gathering.computing() as end_pass:
            found = rank(x)
            (2 * found).backward()
            end_pass()
        assert rank.there == "", "all memory is given back"
        torch.testing.assert_close(found.detach(), output, rtol=1e-12, atol=0)
        rank.vectors.reduce_gathered()
        for name, each in rank.units.items():
            assert each.gradient is not None
            torch.testing.assert_close(each.gradient, gradients[name].flatten()[:64] + 100, rtol=1e-12, atol=0)
        if not prefetch:
            assert peer.log == [*forward, "reduce", "gather b", "reduce", "gather a", "reduce"]
        elif pass_number == 0:  # what follows in a backward pass is not known yet
            assert peer.log == [*forward, "reduce", "reduce", "gather a", "reduce"]
        else:
            assert peer.log == [*forward, "reduce", "gather a", "reduce", "reduce"]
    if prefetch:
        assert seen == ["a", "ab", "bc", "ab", "bc", "bc", "ab", "bc", "bc"]
    else:
        assert seen == ["a", "b", "c"] * 3


def test_all_units_or_one_have_their_memory(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(peer, "ab")
    points: list[tuple[Point, int]] = []
    monkeypatch.setattr(rank.gathering._agreement, "meet", lambda point: points.append((point, len(peer.log))))
    with rank.gathering.whole():
        assert points == [(Point.WHOLE, 0)], "before anything is gathered"
        assert rank.there == "ab"
        assert all(torch.equal(rank.parameters[f"{name}.weight"].detach(), whole(rank, name)) for name in "ab")
    assert rank.there == ""
    with rank.gathering.alone(rank.units["b"]):
        assert rank.there == "b"
    assert rank.there == ""
    assert peer.log == ["gather a", "gather b", "gather b"]


def peer_asks(kind: str, number: int) -> Callable[[list[int]], list[int]]:
    """The peer asks for one more collective, where this rank asks for none."""
    code = 1 + 2 * number + (kind == "reduce")
    return lambda said: [said[0], said[1], 0, code, 0, 0]


def test_a_unit_that_a_peer_alone_needs_is_lent_for_as_long(peer: Peer) -> None:
    rank = Rank(peer, "ab")
    rank.vectors.attach_gradients(torch.float64)
    peer.asks = [peer_asks("gather", 1)]
    rank.gathering.meet(Point.STEP)
    assert (peer.log, rank.there) == (["gather b"], "")
    with rank.gathering.computing():
        rank.modules[0](torch.tensor(1.0, dtype=torch.float64))
        peer.asks = [peer_asks("gather", 0)]
        rank.gathering.meet(Point.STEP)
        assert rank.there == "a", "what is in use here stays"
        assert torch.equal(rank.parameters["a.weight"].detach(), whole(rank, "a"))
    peer.asks = [peer_asks("reduce", 0)]
    rank.gathering.meet(Point.STEP)
    gradient = rank.units["a"].gradient
    assert gradient is not None
    assert gradient.tolist() == [100.0] * 64, "zeros are added where there is none"


def test_a_parameter_that_is_read_part_by_part_is_gathered_for_its_use_and_collects_its_gradient(peer: Peer) -> None:
    rank = Rank(peer, "ab")
    parameter, of = rank.parameters["b.weight"], rank.units["b"]
    rank.gathering.connect_weight(parameter, of)
    with pytest.raises(AssertionError):
        gradient_sink(parameter)
    rank.vectors.attach_gradients(torch.float32)
    with rank.gathering.computing():
        before_use(parameter)
        assert rank.there == "b"
        sink = gradient_sink(parameter)
        assert sink is not None
        assert (sink.dtype, sink.shape, bool((sink == 0).all())) == (torch.float32, (ROWS, COLUMNS), True)
        sink += 2
        again = gradient_sink(parameter)
        assert again is not None
        again += 3
    peer.log.clear()
    rank.vectors.reduce_gathered()
    assert peer.log == ["reduce"]
    assert of.gradient is not None
    assert of.gradient.tolist() == [105.0] * 64


def test_what_is_trained_has_gradients_of_the_dtype_that_they_are_summed_in(peer: Peer) -> None:
    rank = Rank(peer, "a")
    parameter = rank.parameters["a.weight"].requires_grad_(False)
    rank.vectors.attach_gradients(torch.float32)
    assert (parameter.requires_grad, parameter.grad_dtype) == (True, torch.float32)


def test_what_is_in_use_is_not_asked_for_again(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, gathers = Rank(peer, "a"), []
    rank.vectors.attach_gradients(torch.float64)
    gather = rank.gathering._gather
    monkeypatch.setattr(rank.gathering, "_gather", lambda needed: gathers.append(gather(needed)))
    with rank.gathering.computing():
        rank(torch.tensor(1.0, dtype=torch.float64)).backward()
    assert len(gathers) == 1


def test_what_is_started_in_advance_is_what_followed_the_last_two_units(peer: Peer) -> None:
    """After `a` comes `b` at first, and `c` where `b` was before."""
    rank = Rank(peer, "abc")
    first, second, third = rank.modules
    for _ in range(3):
        peer.log.clear()
        with rank.gathering.computing(), torch.no_grad():
            for module in (first, second, first, third):
                module(torch.tensor(1.0, dtype=torch.float64))
        assert peer.log == ["gather a", "gather b", "gather c"]


def test_what_ended_a_pass_is_followed_by_nothing(peer: Peer) -> None:
    rank = Rank(peer, "abc")
    logs = []
    for used in (3, 2, 2):
        peer.log.clear()
        with rank.gathering.computing(), torch.no_grad():
            for module in rank.modules[:used]:
                module(torch.tensor(1.0, dtype=torch.float64))
        logs.append("".join(each[-1] for each in peer.log))
    assert logs == ["abc", "abc", "ab"]


def test_gradients_of_a_unit_that_may_get_more_are_not_reduced(peer: Peer) -> None:
    rank = Rank(peer, "ab", prefetch=False)
    rank.vectors.attach_gradients(torch.float64)
    first, second = rank.units.values()
    rank.gathering._with_gradients[first] = None
    rank.gathering._gather([first])
    assert peer.log == ["gather a"]
    rank.gathering._gather([second])
    assert peer.log == ["gather a", "reduce", "gather b"]


def test_what_is_lent_has_arrived_before_and_after(peer: Peer) -> None:
    rank, one = Rank(peer, "ab"), torch.tensor(1.0, dtype=torch.float64)

    def waits_for(number: int) -> int:
        before, peer.asks = peer.waits, [peer_asks("gather", number)]
        rank.gathering.meet(Point.STEP)
        return peer.waits - before

    with rank.gathering.computing(), torch.no_grad():
        rank.modules[0](one)
        assert (waits_for(0), rank.there) == (2, "a")
        assert (waits_for(1), rank.there) == (2, "a")
        rank.modules[1](one)
    with rank.gathering.computing(), torch.no_grad():
        rank.modules[0](one)
        assert (waits_for(1), rank.there) == (4, "ab"), "it was arriving here in advance"


def test_what_autograd_has_kept_of_a_unit_is_gathered_when_it_is_read(peer: Peer) -> None:
    rank = Rank(peer, "ab", prefetch=False)
    rank.vectors.attach_gradients(torch.float64)
    modules = [Scale(parameter) for parameter in rank.parameters.values()]
    for module, of in zip(modules, rank.units.values(), strict=True):
        rank.gathering.connect(module, [of], backward=False)
    x = torch.tensor(0.5, dtype=torch.float64)
    _, gradients = expected_of(rank, "ab", x)
    with rank.gathering.computing():
        (2 * modules[1](modules[0](x))).backward()
    assert peer.log == ["gather a", "gather b", "reduce", "gather a"]
    rank.vectors.reduce_gathered()
    for name, of in rank.units.items():
        assert of.gradient is not None
        torch.testing.assert_close(of.gradient, gradients[name].flatten()[:64] + 100, rtol=1e-12, atol=0)


def test_memory_is_given_back_when_nothing_arrives_there_any_more(peer: Peer) -> None:
    gathered = GatheredUnit(unit("x").flat, torch.zeros(64))
    gathered.start_gather(peer.group)  # type: ignore[arg-type]
    assert peer.waits == 0
    gathered.free()
    assert peer.waits == 2


def test_a_step_ends_when_all_ranks_have_reduced(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(peer, "ab")
    for name in ("reduce", "meet"):
        monkeypatch.setattr(rank.gathering, name, lambda *what, name=name: peer.log.append((name, *what)))
    rank.vectors.reduce_gathered()
    assert peer.log == [("reduce",), ("meet", Point.STEP)]


class Direct(torch.autograd.Function):
    """Reads a parameter in its backward pass that autograd has not kept for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seen: list[int]) -> Tensor:
        ctx.weight, ctx.seen = weight, seen
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.seen.append(ctx.weight.untyped_storage().nbytes())
        return grad * 2, torch.ones(ROWS, COLUMNS, dtype=torch.float64), None


@pytest.mark.parametrize("needs_values", [True, False])
def test_a_backward_pass_finds_what_it_needs_or_nothing(peer: Peer, needs_values: bool) -> None:
    """Gradients of others are reduced before it makes its own."""

    class Module(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return Direct.apply(x, self.weight, seen)  # type: ignore[no-any-return]

    seen: list[int] = []
    rank = Rank(peer, "ab", prefetch=False)
    rank.vectors.attach_gradients(torch.float64)
    modules = [Module(rank.parameters[f"{name}.weight"]) for name in "ab"]
    for name, module in zip("ab", modules, strict=True):
        rank.gathering.connect(module, [rank.units[name]], backward=needs_values)
    with rank.gathering.computing():
        x = torch.ones((), dtype=torch.float64, requires_grad=True)
        modules[1](modules[0](x)).backward()
    again = ["gather a"] * needs_values
    assert peer.log == ["gather a", "gather b", "reduce", *again]
    assert [size > 0 for size in seen] == [True, needs_values]
    rank.vectors.reduce_gathered()
    assert peer.log[-1] == "reduce"


def test_gradients_of_a_pass_that_failed_are_forgotten(peer: Peer) -> None:
    rank = Rank(peer, "ab")
    rank.vectors.attach_gradients(torch.float64)
    with rank.gathering.computing():
        rank(torch.tensor(1.0, dtype=torch.float64)).backward()
    rank.vectors.gradient.fill_(7.0)
    rank.vectors.zero_gradients()
    assert all(parameter.grad is None for parameter in rank.parameters.values())
    peer.log.clear()
    rank.vectors.reduce_gathered()
    assert peer.log == []
    assert (rank.vectors.gradient == 0).all()


def test_the_end_of_a_pass_within_a_backward_pass_is_one_that_not_all_ranks_have(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, points = Rank(peer, "a"), []
    monkeypatch.setattr(rank.gathering._agreement, "meet", points.append)
    rank.gathering.end_pass()
    x = torch.ones(2, requires_grad=True)
    doubled = x * 2
    doubled.register_hook(lambda _: rank.gathering.end_pass())
    again = doubled * 1
    rank.gathering.end_backward_of([doubled, torch.ones(2), again])
    (again + doubled).sum().backward(retain_graph=True)
    assert points == [Point.PASS, Point.BACKWARD, Point.BACKWARD], "and once at the end of the pass"
    doubled.sum().backward()
    assert points[3:] == [Point.BACKWARD, Point.BACKWARD]


def test_gradients_of_several_tensors_are_one_vector_with_zeros_between(peer: Peer) -> None:
    of = unit("x", first=(3,), second=(2, 5))
    shard = torch.zeros(64, dtype=torch.float32)
    gathered = GatheredUnit(of.flat, shard)
    gathered.gradient = torch.ones(64)
    gathered.parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in of.flat.shapes.items()}
    gathered.parameters["first"].grad = torch.tensor([1.0, 2.0, 3.0])
    gathered.reduce_gradients(peer.group)  # type: ignore[arg-type]
    assert gathered.gradient.tolist() == [102.0, 103.0, 104.0, *[101.0] * 61]
    assert all(parameter.grad is None for parameter in gathered.parameters.values())


@pytest.mark.parametrize("columns", [COLUMNS, 3])
def test_the_gradient_of_one_tensor_is_taken_as_it_is_where_it_has_no_padding(peer: Peer, columns: int) -> None:
    of = unit("x", only=(ROWS, columns))
    gathered = GatheredUnit(of.flat, torch.zeros(64))
    gathered.gradient = torch.zeros(64)
    parameter = nn.Parameter(torch.zeros(ROWS, columns))
    parameter.grad = torch.arange(ROWS * columns, dtype=torch.float32).view(ROWS, columns)
    gathered.parameters = {"only": parameter}
    made: list[Tensor] = []
    taken = gathered._whole_gradient(gathered.gradient)
    made.append(taken)
    assert taken.tolist() == [*range(ROWS * columns), *[0] * (128 - ROWS * columns)]
    assert parameter.grad is None
    assert gathered._whole_gradient(gathered.gradient).tolist() == [0] * 128, "there may be none"


MODES = ("replicated", "zero1", "sharded")


@pytest.fixture
def mixed(peer: Peer) -> tuple[DividedParameters, dict[str, nn.Parameter]]:
    units = [unit(mode, mode) for mode in MODES]
    vectors = DividedParameters(units, peer.group, 0, torch.float64, torch.device("cpu"))  # type: ignore[arg-type]
    parameters = {name: nn.Parameter(view) for name, view in vectors.views().items()}
    vectors.connect(parameters, prefetch=True)
    return vectors, parameters


def test_what_is_kept_and_updated_of_units_of_each_mode(peer: Peer, mixed: Any) -> None:
    vectors, parameters = mixed
    assert [(each.mode, kept.start, kept.stop) for each, kept in vectors.kept.items()] == [
        ("replicated", 0, 128), ("zero1", 128, 256), ("sharded", 256, 320)
    ]  # fmt: skip
    # All of the first, half of the second, and the shard of the third.
    assert vectors.updated == [slice(0, 192), slice(256, 320)]
    assert [each.mode for each in vectors.gathered] == ["sharded"]
    assert vectors.group is peer.group
    assert parameters["zero1.weight"].data_ptr() == vectors.flat[128:].data_ptr()


def test_gradients_of_each_mode_are_completed_in_its_way_and_updates_are_told(peer: Peer, mixed: Any) -> None:
    vectors, parameters = mixed
    vectors.attach_gradients(torch.float32)
    assert (vectors.gradient.dtype, len(vectors.gradient)) == (torch.float32, 320)
    for mode in MODES[:2]:
        parameter = parameters[f"{mode}.weight"]
        assert parameter.requires_grad
        assert gradient_sink(parameter) is parameter.grad, "large gradients are added to it without autograd"
        assert parameter.grad.dtype == torch.float32
        parameter.grad.add_(1)
    assert vectors.gradient.tolist() == [1.0] * 256 + [0.0] * 64
    vectors.reduce_others()
    assert (peer.log, vectors.gradient.tolist()) == (
        ["all-reduce", "reduce"], [101.0] * 128 + [101.0] * 64 + [1.0] * 64 + [0.0] * 64
    )  # fmt: skip
    peer.log.clear()
    vectors.publish()
    assert peer.log == ["gather a vector"]
    assert vectors.flat.tolist() == [0.0] * 192 + [3.0] * 64 + [0.0] * 64
    vectors.zero_gradients()
    assert (vectors.gradient == 0).all()


def test_a_whole_unit_is_read_and_written(peer: Peer, mixed: Any) -> None:
    vectors, _ = mixed
    for of in vectors.kept:
        name = f"{of.name}.weight"
        with vectors.written_unit(of) as views:
            views[name].copy_(torch.arange(128).view(ROWS, COLUMNS))
        assert all(each.arena.flat.untyped_storage().nbytes() == 0 for each in vectors.gathered.values())
        kept = vectors.flat[vectors.kept[of]]
        assert kept.tolist() == list(range(len(kept)))
        with vectors.whole_unit(of) as views:
            second = [3.0] * 64 if of.mode == "sharded" else list(range(64, 128))
            assert views[name].flatten().tolist() == [*range(64), *second]
    assert all(of.arena.flat.untyped_storage().nbytes() == 0 for of in vectors.gathered.values())


def test_the_padding_of_a_written_unit_is_zero(peer: Peer) -> None:
    of = unit("x", small=(3,))
    vectors = DividedParameters([of], peer.group, 0, torch.float64, torch.device("cpu"))  # type: ignore[arg-type]
    vectors.flat.fill_(7.0)
    with vectors.written_unit(of) as views:
        views["small"].fill_(1.0)
    assert vectors.flat.tolist() == [1.0] * 3 + [0.0] * 61


def test_one_rank_alone_has_nothing_to_gather() -> None:
    of = unit("x")
    vectors = DividedParameters([of], None, 0, torch.float64, torch.device("cpu"))
    with pytest.raises(AssertionError, match="one data-parallel rank has nothing to gather"):
        vectors.connect({"x.weight": nn.Parameter(torch.zeros(ROWS, COLUMNS))}, prefetch=True)
    assert vectors.group is None


def updated(*modes: Any, index: int) -> Sequence[slice]:
    units = [unit(str(number), mode) for number, mode in enumerate(modes)]
    return DividedParameters(units, None, index, torch.float32, torch.device("cpu")).updated


def test_parts_that_touch_are_one() -> None:
    assert updated("zero1", "zero1", index=0) == [slice(0, 64), slice(128, 192)]
    assert updated("zero1", "zero1", index=1) == [slice(64, 128), slice(192, 256)]
    assert updated("zero1", "replicated", index=1) == [slice(64, 256)]
    assert updated("replicated", "sharded", "sharded", index=1) == [slice(0, 256)]
