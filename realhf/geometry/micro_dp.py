"""Layouts in which every device's part of the model contains its part in the home (HybridFlow, section 5.3).

A model trains with degrees t and p, and generates with smaller t_g and p_g on the same devices. If both layouts order
their ranks alike, a device may generate with a part of the model that lacks its part in training. If tensor and
pipeline peers are t / t_g and p / p_g ranks apart, it never does: a device receives only the rest, and keeps nothing
twice.
"""

from functools import lru_cache

from msgspec.structs import replace

from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy, held_layers


def contains(outer: Layout, inner: Layout, num_layers: int) -> bool:
    """Whether every device of `inner` holds under `outer` all of the model that it holds under `inner`."""
    if outer.mesh == inner.mesh:
        return _contains(outer.strategy, inner.strategy, num_layers)
    return all(
        device in outer.mesh.devices and _contains_on(device, outer, inner, num_layers) for device in inner.mesh.devices
    )


def contains_home(num_layers: int, home: Layout, layout: Layout) -> bool:
    """Whether a copy in `layout`, which is not the home's, lies on the same devices and contains the home's parameters
    on each."""
    if layout.mesh != home.mesh or layout == home:
        return False
    # With groups it contains the home, and a look takes long.
    return grouped_like(home, layout, num_layers) == layout or contains(layout, home, num_layers)


@lru_cache(maxsize=65536)
def _contains(outer: ParallelStrategy, inner: ParallelStrategy, num_layers: int) -> bool:
    """Where both are on the same devices it does not matter on which."""
    mesh = DeviceMesh(0, inner.size)
    of_outer, of_inner = Layout(mesh, outer), Layout(mesh, inner)
    return all(_contains_on(device, of_outer, of_inner, num_layers) for device in mesh.devices)


def _contains_on(device: int, outer: Layout, inner: Layout, num_layers: int) -> bool:
    """Embedding and head need no check: they are on the stages of the first and the last layer."""
    _, outer_tp, outer_stage = outer.coordinates(device)
    _, inner_tp, inner_stage = inner.coordinates(device)
    outer_size, inner_size = outer.strategy.tp, inner.strategy.tp
    begins = outer_tp * inner_size <= inner_tp * outer_size
    ends = (inner_tp + 1) * outer_size <= (outer_tp + 1) * inner_size
    layers = held_layers(num_layers, inner.strategy, inner_stage)
    return begins and ends and layers <= held_layers(num_layers, outer.strategy, outer_stage)


def grouped_like(home: Layout, layout: Layout, num_layers: int) -> Layout | None:
    """`layout` with the `micro_dp` with which it contains `home`; None if there is none.

    There is none on other devices, with degrees that do not divide those of the home, and if stages of the home reach
    beyond those of the layout (six layers lie 2, 2, 1, 1 on four stages, and 3, 3 on two).
    """
    if layout.mesh != home.mesh:
        return None
    strategy = _grouped_like(home.strategy, layout.strategy, num_layers)
    return Layout(layout.mesh, strategy) if strategy else None


@lru_cache(maxsize=65536)
def _grouped_like(inner: ParallelStrategy, outer: ParallelStrategy, num_layers: int) -> ParallelStrategy | None:
    if inner.tp % outer.tp or inner.pp % outer.pp or outer.chunks > 1:
        return None
    interval = inner.pp // outer.pp
    nests = all(
        held_layers(num_layers, inner, stage) <= held_layers(num_layers, outer, stage // interval)
        for stage in range(inner.pp)
    )
    return replace(outer, micro_dp=(inner.tp // outer.tp, interval)) if nests else None
