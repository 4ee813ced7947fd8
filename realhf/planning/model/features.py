"""What an engine does: the choices of an implementation that change the seconds and bytes of a call."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from realhf.api.experiment import ModelSetup
from realhf.api.generation import DecodeGraphs
from realhf.architecture.compute import Recomputation
from realhf.architecture.decoding import graphs_refusal, page_tokens
from realhf.architecture.model import DecoderConfig, DType
from realhf.base.errors import UserError
from realhf.dataflow.graph import GENERATE, TRAIN_STEP, ModelInterfaceType
from realhf.planning.model.descriptions import DTYPE_BYTES
from realhf.planning.model.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class EngineFeatures:
    """The defaults are this project's engine as it is; others describe an engine that is measured or planned for.

    zero1: optimizer states and master copy are divided over dp; gradients are reduce-scattered and parameters
        all-gathered once a mini-batch (ZeRO, Rajbhandari et al., 2020, section 5.1). Else all of it is on every rank.
    fully_sharded: parameters and gradients are divided over dp as well, and a layer's are gathered for its forward and
        again for its backward pass (ZeRO, section 5.3). A model's setup says it (`of_setup`).
    fp32_gradients: gradients of parameters below fp32 are kept, summed and reduced in fp32.
    recomputation: "full": only a layer's input is kept for the backward pass, which runs the layer's forward again
        (Chen et al., 2016; Korthikanti et al., 2022, section 5); "selective": all but products and attention is made
        again. A model's setup says it (`of_setup`).
    on_gpus: the hardware's devices are GPUs. Pages of the KV cache are then as large as flash-attn needs them, where it
        takes the dtype and the heads: whether it is installed there or not, since its pages are the larger ones.
    cuda_graphs: on GPUs, a decode step is replayed as a graph and not launched kernel by kernel, where the options of
        the call ask for it (`GenerationOptions.decode_graphs`) and the model allows it
        (`realhf.architecture.decoding`).
    full_logits: logits are gathered over tp, and every rank makes its passes over the whole vocabulary. Else each
        rank keeps its part of the vocabulary (Megatron-LM, section 3).
    response_logits: of a prompt and its response as one sequence, logits are made of the response's tokens only.
    gathers_drawn_logits: the logits of the tokens that generation draws are full ones, whatever the others are.
    logits_chunk_bytes: unless full, logits exist for so many bytes of tokens at a time, and the backward pass
        projects all but the last of these chunks again; None: for all tokens of a micro-batch.
    sequence_parallel: in training, what lies between the tensor-parallel products is divided over tp along the
        tokens; an all-gather and a reduce-scatter stand in the place of every all-reduce (Korthikanti et al., 2022,
        section 4.2), and between stages every rank sends its tokens only. A model's setup says it (`of_setup`).
    blocking_sends: a pipeline stage does not compute while it sends, as it never does while it receives.
    sharded_operators: where the states of a train call do not fit, operators whose parameters and gradients are divided
        over dp, too, and gathered for each use (`realhf.planning.model.sharding`; OSDP, IJCAI 2023).
    offloads_states: the optimizer's states and master copy wait in host memory, and pass through the device in chunks
        once a mini-batch. A model's setup says it (`of_setup`).
    packs_weights: generation keeps the linears' weights in the order of its kernels as well: on the CPU, in float32
        and bfloat16. The hardware's description says it.
    in_host_memory: tensors lie in memory that malloc gives, and training attends in float32 at least: on the CPU.
    copies_checkpoints: training goes on while a checkpoint is written from a copy, which is in the memory of the device
        where that is the host's. A run that saves on its way says it (`--checkpoint-every`).
    """

    zero1: bool = True
    fully_sharded: bool = False
    fp32_gradients: bool = True
    recomputation: Recomputation = "off"
    on_gpus: bool = False
    cuda_graphs: bool = True
    full_logits: bool = False
    response_logits: bool = True
    gathers_drawn_logits: bool = True
    logits_chunk_bytes: int | None = 4 << 20  # as in realhf/parallel/vocabulary.py
    sequence_parallel: bool = False
    blocking_sends: bool = False
    sharded_operators: bool = False
    offloads_states: bool = False
    packs_weights: bool = False
    in_host_memory: bool = False
    copies_checkpoints: bool = False

    def gradient_bytes(self, dtype: DType) -> int:
        """Bytes of one element of the gradient of parameters of `dtype`."""
        return max(DTYPE_BYTES[dtype], 4) if self.fp32_gradients else DTYPE_BYTES[dtype]

    def state_bytes(self, dtype: DType) -> int:
        """Bytes of AdamW's two states of an element of `dtype`, at least in fp32, and of its master copy below that."""
        item = DTYPE_BYTES[dtype]
        return 2 * max(item, 4) + (4 if item < 4 else 0)

    def on(self, hardware: Hardware) -> "EngineFeatures":
        """What holds on this hardware: what there is on GPUs alone, whether weights are packed, and states have another
        memory to wait in."""
        offloads = self.offloads_states and not hardware.shares_host_memory
        return replace(
            self,
            on_gpus=hardware.is_gpu,
            packs_weights=hardware.packs_weights,
            offloads_states=offloads,
            in_host_memory=hardware.shares_host_memory,
            copies_checkpoints=self.copies_checkpoints and hardware.shares_host_memory,
        )

    def page_tokens(self, model: DecoderConfig, dtype: DType) -> int:
        """Tokens in a page of the KV cache."""
        return page_tokens(dtype, model.head_dim, has_flash=self.on_gpus)

    def replays(self, model: DecoderConfig, decode_graphs: DecodeGraphs) -> bool:
        """Whether the decode steps of a call with this option are graphs."""
        asked = self.cuda_graphs and decode_graphs != "off"
        return asked and graphs_refusal(model, on_gpu=self.on_gpus) is None

    def keeps_cache(self, model: DecoderConfig, decode_graphs: DecodeGraphs) -> bool:
        """Whether a call with this option leaves its KV cache where it is, for the graphs of the next one."""
        return decode_graphs == "kept" and self.replays(model, decode_graphs) and not self.fully_sharded

    def during(self, interface: ModelInterfaceType) -> "EngineFeatures":
        """What holds in a call of this kind."""
        if interface is TRAIN_STEP:
            return self
        gathers = self.full_logits or (self.gathers_drawn_logits and interface is GENERATE)
        return replace(self, sequence_parallel=False, full_logits=gathers)


ENGINE = EngineFeatures()

# What the command line calls them: the field, its value in an engine that has the feature, and in one that has not.
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
    "sharded-operators": ("sharded_operators", True, False),
}
WITHOUT = "no-"


def of_setup(setup: ModelSetup, engine: EngineFeatures = ENGINE) -> EngineFeatures:
    """What `engine` does for a model of this setup: the one place where a setup's choices become costs."""
    optimizer = setup.optimizer
    return replace(
        engine,
        fully_sharded=setup.compute.data_parallel == "fsdp",
        sequence_parallel=setup.compute.sequence_parallel,
        recomputation=setup.compute.recomputation,
        offloads_states=optimizer is not None and optimizer.offload_states,
        fp32_gradients=engine.fp32_gradients if optimizer is None else optimizer.fp32_gradients,
    )


def with_features(names: Sequence[str], engine: EngineFeatures = ENGINE) -> EngineFeatures:
    """`engine` with the named features, and without those named `no-...`.

    Raises:
        UserError: a name is not known.
    """
    for name in names:
        if name.removeprefix(WITHOUT) not in FEATURES:
            raise UserError(
                f"feature {name!r} is not known; choose from {', '.join(FEATURES)}, each with {WITHOUT} before it to "
                "plan without it"
            )
        field, present, absent = FEATURES[name.removeprefix(WITHOUT)]
        engine = replace(engine, **{field: absent if name.startswith(WITHOUT) else present})
    return engine


def differences(features: EngineFeatures, engine: EngineFeatures = ENGINE) -> list[str]:
    """By what `features` differs from `engine`, in the names of the command line."""
    return [
        name if getattr(features, field) == present else WITHOUT + name
        for name, (field, present, absent) in FEATURES.items()
        if getattr(features, field) != getattr(engine, field)
        and getattr(features, field) in (present, absent)  # not the other kind of recomputation
    ]
