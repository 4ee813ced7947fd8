"""A GPU that no description knows, described from what its driver reports.

Peaks are cores x clock x operations of a core in a cycle; what is reached of them is the part that the H100 was fitted
to reach (`descriptions/h100.yaml`), over what an H100 reports. Estimates: `realhf profile` measures.
"""

import msgspec

from realhf.architecture.model import DType
from realhf.base.errors import UserError
from realhf.machine.gpus import Gpu
from realhf.planning.model.hardware import Hardware

# FLOP of a CUDA core's share of its multiprocessor in a cycle, dense, by compute capability (least first): the tensor
# cores' products of bfloat16 with sums in float32, where there are such; fused multiply-adds in float32, since the
# engine computes products of float32 in float32; float64 with the tensor cores of 8.0 and 9.0. From NVIDIA's
# architecture whitepapers: Volta (64 cores a multiprocessor), Turing, A100 (1,024 FMA of tensor cores a multiprocessor
# of 64 cores), GA102 and Ada (512 of 128), H100 (2,048 of 128), Blackwell (4,096 of 128; RTX Blackwell 512 of 128).
FLOP_PER_CORE: dict[tuple[int, int], dict[DType, float]] = {
    (0, 0): {"bfloat16": 2, "float32": 2, "float64": 1 / 16},
    (7, 0): {"bfloat16": 2, "float32": 2, "float64": 1},
    (7, 5): {"bfloat16": 2, "float32": 2, "float64": 1 / 16},
    (8, 0): {"bfloat16": 32, "float32": 2, "float64": 2},
    (8, 6): {"bfloat16": 8, "float32": 2, "float64": 1 / 32},
    (9, 0): {"bfloat16": 32, "float32": 2, "float64": 2},
    (10, 0): {"bfloat16": 64, "float32": 2, "float64": 1},
    (12, 0): {"bfloat16": 8, "float32": 2, "float64": 1 / 32},
}
# These sum products of bfloat16 in float32 at half the rate of the other chips of their generations (the same papers).
HALVED = "GeForce"

# Of an H100: fitted over cores x clock x FLOP and over bus x clock, as it reports them (16,896 cores at 1,980 MHz;
# 5,120 bits at 2,619 MHz, two transfers a cycle).
REACHED_OF_PRODUCTS = 4.46e14 / (16_896 * 1.98e9 * 32)
REACHED_OF_MEMORY = 2.66e12 / (2 * 2.619e9 * 5120 / 8)

# Devices of a node where no link is known: PCI Express by way of the host.
PCIE_BANDWIDTH = 1.0e10
PCIE_LATENCY_S = 1.0e-5
PCIE_HOST_BANDWIDTH = 2.4e10  # of PCI Express 4 with 16 lanes


def described(gpu: Gpu, base: Hardware) -> Hardware:
    """A description of `gpu` with what it reports; the costs that software sets are those of `base`.

    Raises:
        UserError: the driver does not report what that needs.
    """
    if gpu.num_cores is None or gpu.clock_hz is None or gpu.memory_bandwidth is None:
        raise UserError(
            f"{gpu.name}: no description is of it, and its driver does not report its cores, clock and memory bus; "
            "write a description and give it with --hardware FILE.yaml (profiles/README.md has the fields)"
        )
    known = max(capability for capability in FLOP_PER_CORE if capability <= gpu.compute_capability)
    rates = dict(FLOP_PER_CORE[known])
    if HALVED in gpu.name and rates["bfloat16"] == 8:
        rates["bfloat16"] = 4
    cycles = gpu.num_cores * gpu.clock_hz
    return msgspec.structs.replace(
        base,
        matmul_flops={dtype: REACHED_OF_PRODUCTS * cycles * flop for dtype, flop in rates.items()},
        memory_bandwidth=REACHED_OF_MEMORY * gpu.memory_bandwidth,
        intra_node_bandwidth=PCIE_BANDWIDTH,
        intra_node_latency_s=PCIE_LATENCY_S,
        host_bandwidth=PCIE_HOST_BANDWIDTH,
    )
