"""Process groups of the layouts of a run, made once and in one order on every rank."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from realhf.cpu import host_group
from realhf.geometry.layout import Layout
from realhf.parallel.waiting import HOST_WAITS, Waits

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's place in a layout and the groups that it communicates in; None for a group of one member."""

    layout: Layout
    rank: int
    tensor: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    # The stages, for messages between two of them by global rank. None also if they do not share the memory of a host:
    # messages then go through the world group, which None means in torch's calls.
    pipeline: dist.ProcessGroup | None = None
    # First and last stage, which both hold a tied embedding; None where there is one stage.
    tied: dist.ProcessGroup | None = None
    # All ranks of the layout, for sums over the whole model such as the gradient norm.
    model: dist.ProcessGroup | None = None
    # How works in these groups are waited for.
    waits: Waits = HOST_WAITS

    @property
    def dp_index(self) -> int:
        return self.layout.coordinates(self.rank)[0]

    @property
    def tp_index(self) -> int:
        return self.layout.coordinates(self.rank)[1]

    @property
    def stage(self) -> int:
        return self.layout.coordinates(self.rank)[2]

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.layout.strategy.pp - 1

    @property
    def holds_outputs(self) -> bool:
        """True on the one rank of a data-parallel replica whose outputs are taken."""
        return self.rank == self.layout.output_device(self.dp_index)

    def stage_rank(self, stage: int) -> int:
        """Global rank of the pipeline peer at `stage` (negative counts from the last)."""
        return self.layout.device(self.dp_index, self.tp_index, stage % self.layout.strategy.pp)


class GroupTable:
    """The process groups of several layouts.

    torch needs every rank of the world to make every group in the same order, so all groups are made here at once, from
    the run's plan; groups of equal ranks are shared. On the CPU, a group of ranks on one host uses its memory. One
    thread may use the groups of layouts, and one thread, the same or another, those of hosts.

    others: further groups, of ascending ranks.
    beside: groups of ascending ranks for the thread of calls beside the devices, for tensors in host memory.
    moves: groups of ascending ranks for broadcasts of parameters, on the thread that uses the groups of hosts.
    waits: how works in these groups are waited for.
    spans_hosts: whether some ranks do not share memory.
    """

    def __init__(
        self,
        layouts: Iterable[Layout],
        rank: int,
        timeout_s: float = 600.0,
        others: Iterable[Ranks] = (),
        waits: Waits = HOST_WAITS,
        beside: Iterable[Ranks] = (),
        moves: Iterable[Ranks] = (),
    ):
        self.rank, self.waits = rank, waits
        hosts = _hosts()
        self.spans_hosts = len(set(hosts)) > 1

        def share_memory(ranks: Ranks) -> bool:
            return len({hosts[rank] for rank in ranks}) == 1

        def made(wanted: Iterable[Ranks], between_hosts: str | None) -> dict[Ranks, dist.ProcessGroup]:
            found = {}
            for ranks in dict.fromkeys(wanted):
                if len(ranks) > 1:
                    backend = host_group.BACKEND if share_memory(ranks) else between_hosts
                    found[ranks] = dist.new_group(list(ranks), timedelta(seconds=timeout_s), backend)
            return found

        wanted: list[Ranks] = []
        for layout in dict.fromkeys(layouts):
            wanted += _collective_groups(layout)
            wanted += filter(share_memory, _pipelines(layout))
        self._groups = made([*wanted, *others], None)
        self._beside = made(beside, "gloo")
        self.of_moves = made(moves, None)
        of_hosts = [tuple(rank for rank, of_rank in enumerate(hosts) if of_rank == host) for host in hosts]
        self._of_hosts = made(of_hosts, None)

    def groups(self, layout: Layout) -> ParallelGroups:
        """The groups of this rank in `layout`, one of those given at construction."""
        dp, tp, stage = layout.coordinates(self.rank)
        return ParallelGroups(
            layout,
            self.rank,
            tensor=self.of_ranks(layout.tensor_group(dp, stage)),
            data=self.of_ranks(layout.data_group(tp, stage)),
            pipeline=self._find_pipeline(layout.pipeline_group(dp, tp)),
            tied=self.of_ranks(_tied_group(layout, dp, tp)),
            model=self.of_ranks(layout.mesh.devices),
            waits=self.waits,
        )

    def of_host(self, devices: Iterable[int]) -> dist.ProcessGroup | None:
        """The group of all ranks of a host, for messages through its memory, if all `devices` are on it; else None."""
        wanted = set(devices)
        return next((group for ranks, group in self._of_hosts.items() if wanted.issubset(ranks)), None)

    def of_ranks(self, ranks: Iterable[int]) -> dist.ProcessGroup | None:
        """The group of these ranks; None if this rank is the only one, or none of them."""
        ranks = tuple(ranks)
        return self._groups[ranks] if len(ranks) > 1 and self.rank in ranks else None

    def of_ranks_beside(self, ranks: Iterable[int]) -> dist.ProcessGroup | None:
        """As `of_ranks`, for the thread of calls beside the devices."""
        return self._beside.get(tuple(ranks))

    def _find_pipeline(self, ranks: list[int]) -> dist.ProcessGroup | None:
        group = self._groups.get(tuple(ranks))  # a group across hosts may be there for collectives
        return group if group is not None and dist.get_backend(group) == host_group.BACKEND else None


def make_world(store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
    """Makes torch's group of all processes, who meet in `store`: NCCL between GPUs, gloo on the CPU."""
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(_backend(device), store=store, rank=rank, world_size=size, timeout=timeout)


def group_of_all_ranks(device: torch.device, timeout_s: float) -> dist.ProcessGroup:
    """A second group of all ranks, for messages beside those of the world group: a group matches messages in order.

    All ranks must make it at the same point of their programs. `device` may be the host where the world is of GPUs.
    """
    group = dist.new_group(timeout=timedelta(seconds=timeout_s), backend=_backend(device))
    # NCCL wants a collective of all ranks before the first message between two of them.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    return group


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _hosts() -> list[int]:
    """By rank, a number that ranks have in common if they can share memory."""
    world = dist.get_world_size()
    if dist.get_backend() != dist.Backend.GLOO:
        return list(range(world))
    hosts = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(hosts, torch.tensor([host_group.host_identity()]))
    return [int(host) for host in hosts]


def _tied_group(layout: Layout, dp: int, tp: int) -> list[int]:
    pipeline = layout.pipeline_group(dp, tp)
    return sorted({pipeline[0], pipeline[-1]})


def _pipelines(layout: Layout) -> list[Ranks]:
    s = layout.strategy
    return [tuple(layout.pipeline_group(dp, tp)) for dp in range(s.dp) for tp in range(s.tp)]


def _collective_groups(layout: Layout) -> list[Ranks]:
    s = layout.strategy
    groups = [layout.tensor_group(dp, pp) for dp in range(s.dp) for pp in range(s.pp)]
    groups += [layout.data_group(tp, pp) for tp in range(s.tp) for pp in range(s.pp)]
    groups += [_tied_group(layout, dp, tp) for dp in range(s.dp) for tp in range(s.tp)]
    groups.append(list(layout.mesh.devices))
    return [tuple(ranks) for ranks in groups]


class GroupReference:
    """A process group that this reference does not keep alive: it ends, with its threads, when it is destroyed.

    Gloo's threads take the interpreter's lock to let go of tensors. One that does so when the interpreter ends aborts
    the process, so a script's last `destroy_process_group` has to end them.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        """`group`: None for a group of one member."""
        self._found = None if group is None else weakref.ref(group)

    def __call__(self) -> dist.ProcessGroup | None:
        """The group.

        Raises:
            RuntimeError: it is destroyed.
        """
        if self._found is None:
            return None
        group = self._found()
        if group is None:
            raise RuntimeError("the process group is destroyed; destroy it after the last use of the model")
        return group
