"""`realhf.osdp`: a torch module trained with operator-sharded data parallelism (OSDP, IJCAI 2023)."""

import zlib
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from realhf.base.errors import UserError
from realhf.base.numbers import check_range
from realhf.planning.model.hardware import GIB, MEMORY_GB
from realhf.planning.model.osdp.problem import Links
from realhf.profiling.collectives import measure_collectives, measure_overlap
from realhf.wrapping.choice import MOST_SAMPLES, OsdpOptions, block_kinds, choose, problem_of
from realhf.wrapping.handling import handling_seconds
from realhf.wrapping.measuring import (
    MOST_TIMED_SAMPLES,
    Example,
    OptimizerCosts,
    OptimizerFactory,
    SampleCosts,
    optimizer_costs,
    sample_costs,
)
from realhf.wrapping.operators import operators_of
from realhf.wrapping.recomputation import NO_BLOCKS, BlockCosts, block_costs, blocks_of, recompute, sets_of
from realhf.wrapping.trained import OsdpModule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def osdp(
    model: nn.Module,
    optimizer_factory: OptimizerFactory,
    device_mesh: "DeviceMesh",
    *,
    memory_gb: float,
    example: Example,
    batch_size: int | None = None,
    **options: Any,
) -> OsdpModule:
    """Wraps a model of linears, embeddings and norms for data parallelism, each linear and embedding in its own mode.

    Replicated, ZeRO-1 or sharded, whole or in slices: the modes are chosen exactly, from costs measured here, so that
    training is fastest within the memory. All ranks of the mesh call this with the same model; the parameters of its
    first rank are those of all. The model is changed in place. Gradients are means over the ranks.

    Args:
        model: on its device, parameters of one dtype; frozen ones stay as they are. Further modules stay replicated.
        optimizer_factory: makes the optimizer of a list of vectors, this rank's parts of the parameters. It must be
            elementwise (SGD, Adam, AdamW, ...), and is also tried on small vectors.
        device_mesh: with one dimension, the data-parallel group.
        memory_gb: the memory of a rank for parameters, gradients, optimizer states, gathers and activations, in GiB.
        example: `example(n)` runs the model on n samples and returns their loss; used for measuring, before wrapping.
        batch_size: samples of a rank and forward pass; None: those that give the most samples a second, `plan` says.
        options: of `OsdpOptions`: modes, slices, prefetch, recompute, max_batch.

    Raises:
        UserError: nothing fits, and the smallest memory that would do; or an argument cannot be.
    """
    given = OsdpOptions(**options)
    check_range("memory_gb", memory_gb, *MEMORY_GB)
    if batch_size is not None:
        check_range("batch_size", batch_size, 1, MOST_SAMPLES)
    group = _group(device_mesh)
    device, dtype = _device_and_dtype(model)
    if group is not None:
        _make_equal(model, group)
    samples = min(batch_size or MOST_TIMED_SAMPLES, MOST_TIMED_SAMPLES)
    share = sum(p.numel() for p in model.parameters() if p.requires_grad) // device_mesh.size()
    optimizer = optimizer_costs(optimizer_factory, dtype, device, share)
    sample = sample_costs(model, example, samples)
    blocks = block_costs(model, example, blocks_of(model)) if given.recompute else NO_BLOCKS
    if group is not None:
        sample, optimizer = _agreed(sample, optimizer, model, group)
        blocks = _agreed_blocks(blocks, group, device)
    links = _links(group, device, dtype, prefetch=given.prefetch)
    operators = operators_of(model, sample.used_elsewhere)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    whole = partial(problem_of, operators, dtype.itemsize, (sample, optimizer), links, int(memory_gb * GIB))
    problems = [
        replace(whole(again, blocks.bytes_less(again)), extra_bytes=frozen, prefetch=given.prefetch)
        for again in sets_of(block_kinds(operators, sample, blocks))
    ]
    plan = choose(problems, given, batch_size, group)
    for path in plan.recomputed:
        recompute(model.get_submodule(path))
    return OsdpModule(model, operators, plan, optimizer_factory, group, prefetch=given.prefetch)


def _links(group: dist.ProcessGroup | None, device: torch.device, dtype: torch.dtype, *, prefetch: bool) -> Links:
    """The measured costs of a group's collectives."""
    costs = measure_collectives(group, device, dtype)
    return Links(
        num_devices=1 if group is None else group.size(),
        measured=costs,
        handling_s=handling_seconds(group, device, dtype, costs),
        overlap=measure_overlap(group, device, dtype) if prefetch else 0.0,
    )


def _group(device_mesh: "DeviceMesh") -> dist.ProcessGroup | None:
    if device_mesh.ndim != 1:
        raise UserError(
            f"device_mesh has {device_mesh.ndim} dimensions, and data parallelism is one: give mesh['dp'], or "
            "init_device_mesh(device, (ranks,))"
        )
    if device_mesh.size() == 1:
        return None
    group = device_mesh.get_group()
    if dist.get_backend(group) != "gloo":
        return group
    # A group of its own: torch's modules hold the world's group, with gloo's threads, to the end of the process.
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)


def _device_and_dtype(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of the trained parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    kinds = sorted({f"{p.dtype} on {p.device.type}" for p in trained})
    if len(kinds) != 1 or trained[0].device.type == "meta":
        raise UserError(
            f"the trained parameters of the model are {' and '.join(kinds) or 'none'}: they must be of one dtype and "
            "lie on one device that has memory; convert or move the model before"
        )
    return trained[0].device, trained[0].dtype


def _make_equal(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Gives all ranks the parameters and buffers of the first.

    Raises:
        UserError: ranks have different models.
    """
    tensors = [*model.parameters(), *model.buffers()]
    shapes = ",".join(f"{name}{tuple(p.shape)}{p.requires_grad}" for name, p in model.named_parameters())
    digest = float(zlib.crc32(shapes.encode()))
    ends = torch.tensor([digest, -digest], dtype=torch.float64, device=tensors[0].device)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    if ends.sum() != 0:
        raise UserError("the model has other parameters on other ranks; make the same model on all of them")
    for tensor in tensors:
        dist.broadcast(tensor.detach(), group=group, group_src=0)


def _agreed(
    sample: SampleCosts, optimizer: OptimizerCosts, model: nn.Module, group: dist.ProcessGroup
) -> tuple[SampleCosts, OptimizerCosts]:
    """The largest of all ranks' numbers, on every rank."""
    paths = [path for path, _ in model.named_modules()]
    names = [name for name, _ in model.named_parameters()]
    numbers = [
        *(sample.bytes_per_sample, sample.seconds_per_sample),
        *(optimizer.state_bytes, optimizer.update_s, optimizer.accumulate_s),
        *(counts[path] for counts in (sample.uses, sample.products) for path in paths),
        *(float(name in sample.used_elsewhere) for name in names),
    ]
    tensor = torch.tensor(numbers, dtype=torch.float64, device=next(model.parameters()).device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    size, seconds, state_bytes, update_s, accumulate_s, *others = tensor.tolist()
    counts = [Counter(dict(zip(paths, map(int, others[i * len(paths) :]), strict=False))) for i in range(2)]
    elsewhere = others[2 * len(paths) :]
    return (
        SampleCosts(
            bytes_per_sample=int(size),
            seconds_per_sample=seconds,
            uses=counts[0],
            products=+counts[1],
            used_elsewhere=frozenset(name for name, is_one in zip(names, elsewhere, strict=True) if is_one),
        ),
        OptimizerCosts(state_bytes=state_bytes, update_s=update_s, accumulate_s=accumulate_s),
    )


def _agreed_blocks(blocks: BlockCosts, group: dist.ProcessGroup, device: torch.device) -> BlockCosts:
    """The least that any rank saves, and the most that any has again."""
    ends = torch.tensor(
        [blocks.again, *(-saved for saved in blocks.saved.values())], dtype=torch.float64, device=device
    )
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    again, *saved = map(int, ends.tolist())
    return BlockCosts(saved={path: -less for path, less in zip(blocks.saved, saved, strict=True)}, again=again)
