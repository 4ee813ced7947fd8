"""Placement by hand: named sets of devices, to which models are confined (HybridFlow's resource pools, section 4.1)."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from realhf.base.errors import UserError
from realhf.geometry.layout import DeviceMesh


@dataclass(frozen=True)
class Pool:
    """Devices of the run, by their numbers from 0 on: `Pool("train", devices=range(0, 4))`.

    All calls of a model that was given a pool run on devices of it, each on all of them or on some, as the plan says.
    Models that share a pool, or whose pools overlap, take turns on the devices that they share.
    """

    name: str
    devices: Sequence[int]

    def __post_init__(self) -> None:
        devices = tuple(self.devices)
        if not self.name:
            raise UserError(f"Pool({self.name!r}, devices={list(devices)}) has no name; give it one for messages")
        if not devices or any(not isinstance(device, int) or device < 0 for device in devices):
            raise UserError(f"{self} needs the numbers, from 0 on, of at least one device; give devices=range(0, 4)")
        if len(set(devices)) < len(devices):
            raise UserError(f"{self} names a device twice; name each once")
        object.__setattr__(self, "devices", tuple(sorted(devices)))

    def __str__(self) -> str:
        return f"pool {self.name!r} (devices {_listed(tuple(self.devices))})"

    def __contains__(self, mesh: DeviceMesh) -> bool:
        """Whether all devices of a mesh are the pool's."""
        return set(mesh.devices) <= set(self.devices)

    @property
    def runs(self) -> list[DeviceMesh]:
        """The devices as meshes: the longest runs of neighbours."""
        runs: list[DeviceMesh] = []
        for device in self.devices:
            if runs and device == runs[-1].first + runs[-1].size:
                runs[-1] = DeviceMesh(runs[-1].first, runs[-1].size + 1)
            else:
                runs.append(DeviceMesh(device, 1))
        return runs


def check_pools(pools: Mapping[str, Pool], models: Collection[str]) -> None:
    """Raises UserError for a pool of a model that no call uses, or two pools of one name."""
    of_name: dict[str, Pool] = {}
    for model, pool in pools.items():
        if not isinstance(pool, Pool):
            raise UserError(f"pools: {model!r} has {pool!r}; give it a Pool('train', devices=range(0, 4))")
        if model not in models:
            raise UserError(f"pools: {model!r} is used by no call; the calls use {', '.join(sorted(models))}")
        if of_name.setdefault(pool.name, pool) != pool:
            raise UserError(f"pools: {of_name[pool.name]} and {pool} have one name; rename one of them")


def check_devices(pools: Iterable[Pool], num_devices: int) -> None:
    """Raises UserError for a pool with a device that a cluster of `num_devices` does not have."""
    for pool in pools:
        if pool.devices[-1] >= num_devices:
            raise UserError(
                f"{pool} has device {pool.devices[-1]}, and there are {num_devices}, numbered from 0 on; give "
                f"--num-workers {pool.devices[-1] + 1} or more, or a pool of these"
            )


def _listed(devices: Sequence[int]) -> str:
    """`0-3, 6`; whatever is no number as it is."""
    if not all(isinstance(device, int) for device in devices):
        return ", ".join(map(repr, devices))
    ends: list[list[int]] = []  # for each run of neighbours: the first, and the last if it is another
    for device in devices:
        if ends and device == ends[-1][-1] + 1:
            ends[-1][1:] = [device]
        else:
            ends.append([device])
    return ", ".join("-".join(map(str, run)) for run in ends) or "none"
