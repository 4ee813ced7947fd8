"""AdamW on a flat vector of parameters, and its learning rate."""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adamw import adamw

from realhf.api.experiment import OptimizerConfig
from realhf.architecture.chunks import OPTIMIZER_ELEMENTS
from realhf.cpu import fused
from realhf.engine.train.staging import Staging

# Elements that are updated at a time on a CPU: their gradients and states stay in a core's cache from the first pass
# over them to the last.
_CPU_CHUNK = 2**18
_VECTORS = 64


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step` (from 0): linear warm-up to `lr` over `warmup_steps` steps, then
    the schedule, which decays towards `final_lr_ratio * lr` at step `total_steps` and stays there."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    match config.schedule:
        case "constant":
            remaining = 1.0
        case "linear":
            remaining = 1.0 - progress
        case "cosine":  # Loshchilov and Hutter 2017, equation 5, without restarts
            remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.final_lr_ratio + (1.0 - config.final_lr_ratio) * remaining)


def gradient_dtype(parameters: torch.dtype, config: OptimizerConfig) -> torch.dtype:
    """The dtype in which gradients are summed over micro-batches and ranks, for parameters of a dtype."""
    return torch.promote_types(parameters, torch.float32) if config.fp32_gradients else parameters


def chunks(vector: Tensor) -> Iterator[slice]:
    """The parts of a vector that one pass after another is made over."""
    size = _CPU_CHUNK if vector.device.type == "cpu" else OPTIMIZER_ELEMENTS
    return (slice(start, start + size) for start in range(0, len(vector), size))


def square_sum(vector: Tensor) -> Tensor:
    """The sum of the squares of `vector`, a number in float64, without a copy of the vector in that precision."""
    if fused.takes(vector):
        return torch.tensor(fused.square_sum(vector), dtype=torch.float64)
    parts = [torch.linalg.vector_norm(vector[part], dtype=torch.float64).square() for part in chunks(vector)]
    return torch.stack(parts).sum() if parts else vector.new_zeros((), dtype=torch.float64)


class FlatAdamW:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) on `parameters`, vectors that it changes in place.

    They may be any parts of a model's arena. Moments have their dtype and are vectors of all parts, end to end; below
    float32 they are float32, and so is a master copy of the parameters, which these are then rounded from
    (Micikevicius et al. 2018, section 3.1). With `offload_states`, all of these lie in host memory between steps.
    """

    def __init__(
        self, parameters: Sequence[Tensor], config: OptimizerConfig, total_steps: int, *, in_vectors: bool = False
    ):
        """`in_vectors`: an element's bits do not depend on its place in `parameters`."""
        self.config, self.total_steps, self._in_vectors = config, total_steps, in_vectors
        self.parameters = [part.detach() for part in parameters]
        self.step_count = 0
        first, *_ = parameters  # all have its dtype and device
        dtype, device = first.dtype, first.device
        wide = torch.promote_types(dtype, torch.float32)
        self.has_master = wide != dtype
        kinds = ["exp_avg", "exp_avg_sq", *(["master"] if self.has_master else [])]
        # Made here, not at the first step, so that a checkpoint can be loaded into them.
        size = sum(map(len, parameters))
        is_pinned = bool(config.offload_states) and device.type == "cuda"  # copies need not wait then
        host = torch.device("cpu") if config.offload_states else device
        self.state = {kind: torch.zeros(size, dtype=wide, device=host, pin_memory=is_pinned) for kind in kinds}
        self._staging = Staging(device) if config.offload_states else None
        self.parameters_changed()

    @property
    def lr(self) -> float:
        """The rate of the next step."""
        return learning_rate(self.config, self.step_count, self.total_steps)

    def on_device(self) -> list[Tensor]:
        """The states that lie beside the parameters, not in host memory."""
        return [] if self.config.offload_states else list(self.state.values())

    def parameters_changed(self) -> None:
        """Takes over parameters that were written from outside, where a master copy would undo that."""
        if self.has_master:
            for part, at in self._parts():
                self.state["master"][at].copy_(part)

    def step(self, gradients: Sequence[Tensor], scale: float = 1.0) -> None:
        """One update with `scale` times `gradients`, vectors like the parameters, which stay as they are.

        Beyond the states it needs memory for a chunk alone, and for those of the states that come from the host.
        """
        updates = [
            (
                {kind: state[at][chunk] for kind, state in self.state.items()},
                partial(self._update, parameters[chunk], gradient[chunk], scale),
            )
            for (parameters, at), gradient in zip(self._parts(), gradients, strict=True)
            for chunk in chunks(parameters)
        ]
        if self._staging is not None:
            self._staging.each(updates)
        else:
            for state, update in updates:
                update(state)
        self.step_count += 1

    def _parts(self) -> Iterator[tuple[Tensor, slice]]:
        """Every vector of parameters, with its place in the states."""
        start = 0
        for part in self.parameters:
            yield part, slice(start, start + len(part))
            start += len(part)

    def _update(self, parameters: Tensor, gradients: Tensor, scale: float, state: dict[str, Tensor]) -> None:
        rest = len(parameters) % _VECTORS if self._in_vectors else 0
        if not rest:
            return self._update_vectors(parameters, gradients, scale, state)
        if whole := len(parameters) - rest:
            whole_state = {kind: each[:whole] for kind, each in state.items()}
            self._update_vectors(parameters[:whole], gradients[:whole], scale, whole_state)
        # torch computes the numbers behind whole vectors by other instructions, which round otherwise.
        behind = {kind: F.pad(each[whole:], (0, _VECTORS - rest)) for kind, each in state.items()}
        padded = F.pad(parameters[whole:], (0, _VECTORS - rest))
        self._update_vectors(padded, F.pad(gradients[whole:], (0, _VECTORS - rest)), scale, behind)
        parameters[whole:].copy_(padded[:rest])
        for kind, each in state.items():
            each[whole:].copy_(behind[kind][:rest])

    def _update_vectors(self, parameters: Tensor, gradients: Tensor, scale: float, state: dict[str, Tensor]) -> None:
        target = state["master"] if self.has_master else parameters
        gradients = gradients.to(target.dtype)
        adamw(
            [target],
            [gradients if scale == 1.0 else gradients * scale],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [torch.full((), float(self.step_count), device=target.device)],  # no copy, for which the host would wait
            fused=True,  # one pass, no temporaries
            amsgrad=False,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            lr=self.lr,
            weight_decay=self.config.weight_decay,
            eps=self.config.eps,
            maximize=False,
        )
        if self.has_master:
            parameters.copy_(target)
