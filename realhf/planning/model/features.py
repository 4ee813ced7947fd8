"""Features of an engine: choices of an implementation that change the seconds and bytes of a call."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from realhf.api.computation import computation_of
from realhf.api.experiment import ModelSetup
from realhf.architecture.chunks import GPU_LOGITS_BYTES, LOGITS_BYTES
from realhf.architecture.compute import Computation, ModeRules, Recomputation, Recomputed
from realhf.architecture.decoding import GraphLife, graphs_refusal
from realhf.architecture.model import DTYPE_BYTES, DecoderConfig, DType
from realhf.architecture.transformers_config import BACKEND as TRANSFORMERS
from realhf.base.errors import UserError
from realhf.dataflow.plan import CallCompute
from realhf.planning.model.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class EngineFeatures:
    """The defaults are this project's engine; others describe an engine that is measured or planned for. A model's
    setup sets some (`of_setup`), the hardware others (`on`).

    zero1: optimizer states and master copy are divided over dp; gradients are reduce-scattered and parameters
        all-gathered once a mini-batch (ZeRO, Rajbhandari et al., 2020, section 5.1). Else every rank has all of it.
    fully_sharded: parameters and gradients are divided over dp as well; a layer's are gathered for its forward and
        again for its backward pass (ZeRO, section 5.3).
    modes: of operators, where they have modes of their own (OSDP, IJCAI 2023; `realhf.geometry.operators`); None: all
        are as `zero1` and `fully_sharded` say.
    prefetch: while one gathered part is in use, the next is gathered: it takes memory for both, and on GPUs no time as
        far as computation lasts. In a host's memory the cores that compute also copy, and nothing is hidden.
    fp32_gradients: gradients of parameters below fp32 are kept, summed and reduced in fp32.
    recomputation: "full": a layer keeps only its input, and the backward pass runs its forward again (Chen et al.,
        2016; Korthikanti et al., 2022, section 5); "selective": it runs all but products and attention again.
    recomputed_layers: the first layers of every model chunk alone do so; None: all.
    on_gpus: the devices are GPUs, on which decode steps may be graphs and passes take the memory of
        `realhf.planning.model.gpu_memory`.
    multiprocessors: of a GPU, see `realhf.planning.model.hardware.Hardware`.
    cuda_graphs: on GPUs, a decode step is replayed as a graph, where the call asks for it
        (`GenerationOptions.decode_graphs`) and the model allows it (`realhf.architecture.decoding`).
    full_logits: logits are gathered over tp, and every rank makes its passes over the whole vocabulary. Else each
        rank keeps its part of the vocabulary (Megatron-LM, section 3).
    response_logits: of a prompt and its response as one sequence, only the response's tokens get logits.
    gathers_drawn_logits: generation draws from full logits, whatever the others are.
    logits_chunk_bytes: unless full, logits exist for chunks of this size (None: for a micro-batch), and the backward
        pass projects all but the last chunk again. The default is a CPU's; a GPU has `GPU_LOGITS_BYTES`.
    sequence_parallel: in training, what lies between the tensor-parallel products is divided over tp along the
        tokens; an all-gather and a reduce-scatter replace every all-reduce (Korthikanti et al., 2022, section 4.2),
        and between stages every rank sends its own tokens.
    regathers_inputs: with sequence parallelism the backward pass gathers the inputs of products again, which are kept
        divided (Korthikanti et al., 2022, section 4.2.2). This engine keeps them whole.
    blocking_sends: a pipeline stage does not compute while it sends, as it never does while it receives.
    drains_pipelines: an inference, or a generation's prefill, of more micro-batches than stages is a row of pipelines
        of one micro-batch a stage each: one is empty before the next begins. A training is one pipeline.
    offloads_states: the optimizer's states and master copy wait in host memory, and pass through the device in chunks
        once a mini-batch.
    packs_weights: generation also keeps the linears' weights in the order of its kernels (CPU, float32 and bfloat16).
    in_host_memory: malloc gives the tensors' memory, and training attends in float32 at least: on the CPU.
    fuses_training: in training, RMS norms and gated SiLUs are one kernel each (CPU with one thread, float32 and
        bfloat16), of which the inputs alone are kept.
    copies_checkpoints: a checkpoint is written from a copy (`--checkpoint-every`), in memory that the devices share.
    ordered: results have the same bits under every layout (`reproducible="layout"`, `realhf.geometry.reproducible`):
        ranks gather what they would sum, and keep the gradients of parts of a mini-batch apart.
    """

    zero1: bool = True
    fully_sharded: bool = False
    modes: ModeRules | None = None
    prefetch: bool = True
    fp32_gradients: bool = True
    recomputation: Recomputation = "off"
    recomputed_layers: int | None = None
    on_gpus: bool = False
    multiprocessors: int = 1
    cuda_graphs: bool = True
    full_logits: bool = False
    response_logits: bool = True
    gathers_drawn_logits: bool = True
    logits_chunk_bytes: int | None = LOGITS_BYTES
    sequence_parallel: bool = False
    regathers_inputs: bool = False
    blocking_sends: bool = False
    drains_pipelines: bool = False
    offloads_states: bool = False
    packs_weights: bool = False
    in_host_memory: bool = False
    fuses_training: bool = False
    copies_checkpoints: bool = False
    ordered: bool = False

    @property
    def recomputed(self) -> Recomputed:
        return Recomputed(self.recomputation, self.recomputed_layers)

    @property
    def divides_parameters(self) -> bool:
        """Whether some parameters may lie divided over dp, and are gathered for each use."""
        return self.fully_sharded or any("sharded" in modes for _, modes in self.modes or ())

    def gradient_bytes(self, dtype: DType) -> int:
        """Bytes of the gradient of one parameter."""
        return max(DTYPE_BYTES[dtype], 4) if self.fp32_gradients else DTYPE_BYTES[dtype]

    def state_bytes(self, dtype: DType) -> int:
        """Bytes of AdamW's two states of an element of `dtype`, at least in fp32, and of its master copy below that."""
        item = DTYPE_BYTES[dtype]
        return 2 * max(item, 4) + (4 if item < 4 else 0)

    def on(self, hardware: Hardware) -> "EngineFeatures":
        """The features on this hardware. In a host's memory states have no other memory to wait in."""
        in_host = hardware.shares_host_memory
        chunk_bytes = self.logits_chunk_bytes
        if chunk_bytes in (LOGITS_BYTES, GPU_LOGITS_BYTES):
            chunk_bytes = GPU_LOGITS_BYTES if hardware.is_gpu else LOGITS_BYTES
        return replace(
            self,
            on_gpus=hardware.is_gpu,
            multiprocessors=hardware.multiprocessors if hardware.is_gpu else 1,
            logits_chunk_bytes=chunk_bytes,
            packs_weights=hardware.packs_weights,
            offloads_states=self.offloads_states and not in_host,
            in_host_memory=in_host,
            fuses_training=in_host and hardware.threads == 1,
            copies_checkpoints=self.copies_checkpoints and in_host,
        )

    def under(self, compute: CallCompute | Computation) -> "EngineFeatures":
        """The features for a model that a plan, or its setup, computes in this way."""
        chosen: dict[str, Any] = {
            "recomputation": compute.recomputation,
            "recomputed_layers": compute.recomputed_layers,
            "sequence_parallel": compute.sequence_parallel,
            "prefetch": compute.prefetch,
            "offloads_states": compute.offload_states and not self.in_host_memory,
        }
        chosen = {field: value for field, value in chosen.items() if value is not None}
        if (way := compute.data_parallel) is not None:
            chosen |= {"fully_sharded": way == "fsdp", "modes": way if isinstance(way, tuple) else None}
        return replace(self, **chosen)

    def replays(self, model: DecoderConfig, decode_graphs: GraphLife) -> bool:
        """Whether the decode steps of a call with this option are graphs."""
        return self.cuda_graphs and decode_graphs != "off" and graphs_refusal(model, on_gpu=self.on_gpus) is None

    def keeps_cache(self, model: DecoderConfig, decode_graphs: GraphLife) -> bool:
        """Whether a call with this option leaves its KV cache where it is, for the graphs of the next one."""
        return decode_graphs == "kept" and self.replays(model, decode_graphs) and not self.divides_parameters


ENGINE = EngineFeatures()

# By the names of the command line: the field, and its values with and without the feature.
FEATURES: dict[str, tuple[str, Any, Any]] = {
    "zero1": ("zero1", True, False),
    "fp32-gradients": ("fp32_gradients", True, False),
    "recomputation": ("recomputation", "full", "off"),
    "selective-recomputation": ("recomputation", "selective", "off"),
    "cuda-graphs": ("cuda_graphs", True, False),
    "sharded-logits": ("full_logits", False, True),
    "response-logits": ("response_logits", True, False),
    "sharded-sampling": ("gathers_drawn_logits", False, True),
    "chunked-logits": ("logits_chunk_bytes", EngineFeatures.logits_chunk_bytes, None),
    "sequence-parallel": ("sequence_parallel", True, False),
    "overlapped-sends": ("blocking_sends", False, True),
}
WITHOUT = "no-"


def of_setup(setup: ModelSetup) -> EngineFeatures:
    """The engine's features for a model of this setup: the one place where a setup's choices become costs."""
    engine = replace(ENGINE.under(computation_of("", setup)), ordered=setup.reproducible == "layout")
    if setup.backend == TRANSFORMERS:  # its logits are whole tensors, and no decode step is recorded
        engine = replace(engine, full_logits=True, response_logits=False, logits_chunk_bytes=None, cuda_graphs=False)
    return engine if setup.optimizer is None else replace(engine, fp32_gradients=setup.optimizer.fp32_gradients)


def with_features(names: Sequence[str], engine: EngineFeatures = ENGINE) -> EngineFeatures:
    """`engine` with the named features, and without those named `no-...`. Raises UserError for unknown names."""
    for name in names:
        feature = name.removeprefix(WITHOUT)
        if feature not in FEATURES:
            known = ", ".join(FEATURES)
            raise UserError(f"feature {name!r} is not known; choose from {known}, or with {WITHOUT} before one of them")
        field, present, absent = FEATURES[feature]
        engine = replace(engine, **{field: absent if name.startswith(WITHOUT) else present})
    return engine


def differences(features: EngineFeatures, engine: EngineFeatures = ENGINE) -> list[str]:
    """How `features` differ from `engine`, in the names of the command line."""
    return [
        name if getattr(features, field) == present else WITHOUT + name
        for name, (field, present, absent) in FEATURES.items()
        if getattr(features, field) != getattr(engine, field)
        and getattr(features, field) in (present, absent)  # not the other kind of recomputation
    ]
