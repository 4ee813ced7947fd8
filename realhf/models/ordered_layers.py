"""A decoder's layers with the sums of `realhf.parallel.ordered`: the same bits under every layout, in every batch, in
decode steps and in training."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError
from realhf.cpu import fused
from realhf.cpu.in_order import check_in_order
from realhf.geometry.reproducible import lacks_gpu_kernels, tensor_leaves
from realhf.models.attention import Attention
from realhf.models.attention_kernels import machine
from realhf.models.decoder import Decoder, DecoderLayer, SelfAttention
from realhf.models.mlp import ACTIVATIONS, GatedMLP, MixtureOfExperts, PlainMLP
from realhf.models.norms import RMSNorm, normalised_in_order, rms_norm_in_order
from realhf.models.rotary import rotate
from realhf.parallel.ordered import Leaves, columns, on_gpu, row
from realhf.parallel.tensor import ColumnParallelLinear, RowParallelLinear

# torch computes the numbers behind the last whole vector by other instructions, which round otherwise.
_VECTORS = 64


def compute_in_order(decoder: Decoder) -> None:
    """From now on the decoder's results have the same bits under every layout."""
    groups = decoder.groups
    decoder.leaves = Leaves(tensor_leaves(decoder.config) // groups.layout.strategy.tp, groups.tensor)
    decoder.trains_layer = decoder.infers_layer = OrderedLayers(decoder.leaves)


def check_kernels(config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> None:
    """Raises UserError where results of such a model would depend on the layout all the same: for lack of kernels, or
    by the number of threads."""
    if torch.device(device).type != "cuda":
        check_in_order(torch.get_num_threads())
        return
    here, problem = machine("cuda"), lacks_gpu_kernels(config)
    if not problem and not here.runs_triton(dtype, config.head_dim):
        why = next((f", as Triton {lack.why} ({lack.remedy})" for lack in here.lacks if lack.name == "triton"), "")
        problem = (
            f"there are no kernels in {str(dtype).removeprefix('torch.')}{why}; leave reproducible='layout' out, or "
            "run on a GPU of compute capability 8.0 or later with Triton"
        )
    if problem:
        raise UserError(f"reproducible='layout' on {device}: {problem}")


class OrderedLayers:
    """Computes layers in place of their modules, whose parameters it reads."""

    def __init__(self, leaves: Leaves):
        self.leaves = leaves

    def __call__(
        self, layer: DecoderLayer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attention, shards: None = None
    ) -> Tensor:
        """As `DecoderLayer.forward`, without sequence parallelism."""
        assert shards is None
        x = x + self._attention(layer.self_attn, normalised_in_order(layer.input_layernorm, x), cos, sin, attend)
        return x + self._mlp(layer.mlp, normalised_in_order(layer.post_attention_layernorm, x))

    def _attention(self, of: SelfAttention, x: Tensor, cos: Tensor, sin: Tensor, attend: Attention) -> Tensor:
        x = self.leaves.enter(x)
        q, k, v = (out.unflatten(-1, (-1, of.head_dim)) for out in self._columns(x, of.q_proj, of.k_proj, of.v_proj))
        q, k = (rotate(self._of_heads(norm, each), cos, sin) for norm, each in ((of.q_norm, q), (of.k_norm, k)))
        return self._finished(of.o_proj, self._row(of.o_proj, attend(of.layer, q, k, v, of.window).flatten(-2)))

    def _of_heads(self, norm: nn.Module, x: Tensor) -> Tensor:
        """The norm of each head of x [rows, heads, head_dim]. The gradient of its weight is a sum over heads."""
        if not isinstance(norm, RMSNorm):
            return x
        weights = self.leaves.enter(norm.weight)
        parts = zip(x.chunk(self.leaves.own, dim=1), weights, strict=True)
        return torch.cat([rms_norm_in_order(part, weight, norm.eps) for part, weight in parts], dim=1)

    def _mlp(self, mlp: nn.Module, x: Tensor) -> Tensor:
        if isinstance(mlp, MixtureOfExperts):
            return self._experts(mlp, x)
        assert isinstance(mlp, GatedMLP | PlainMLP)
        return self._finished(mlp.down_proj, self._inner(mlp, self.leaves.enter(x)))

    def _inner(self, mlp: GatedMLP | PlainMLP, x: Tensor) -> Tensor:
        """The parts [own, rows, hidden] of the sum that is the output, from x [own, rows, hidden]."""
        activation = ACTIVATIONS[mlp.activation]
        if isinstance(mlp, PlainMLP):
            return self._row(mlp.down_proj, _in_vectors(activation, *self._columns(x, mlp.up_proj)))
        gate, up = self._columns(x, mlp.gate_proj, mlp.up_proj)
        if mlp.activation == "silu" and not on_gpu(gate):
            return self._row(mlp.down_proj, fused.GatedSilu.apply(gate, up))
        return self._row(mlp.down_proj, _in_vectors(activation, gate) * up)

    def _experts(self, moe: MixtureOfExperts, x: Tensor) -> Tensor:
        chosen, weights = moe.choose(*self._columns(x[None], moe.gate))  # every rank has all of the gate
        x, weights = self.leaves.enter(x), self.leaves.enter(weights)
        order = chosen.flatten().argsort(stable=True)  # rows of (token, choice) by expert
        rows = x.repeat_interleave(moe.config.per_token, dim=1)[:, order]
        counts = chosen.flatten().bincount(minlength=moe.config.count).tolist()
        parts = zip(moe.experts, rows.split(counts, dim=1), strict=True)
        outputs = []
        for expert, part in parts:
            assert isinstance(expert, GatedMLP)
            if part.shape[1]:
                outputs.append(self._inner(expert, part))
        given = torch.cat(outputs, dim=1) if outputs else rows
        by_token = given[:, order.argsort()].unflatten(1, chosen.shape)  # [own, tokens, per_token, hidden]
        return self.leaves.leave((by_token * weights[..., None]).sum(dim=2))

    def _columns(self, x: Tensor, *linears: ColumnParallelLinear) -> list[Tensor]:
        weights = [(linear.weight, linear.bias) for linear in linears if linear.weight is not None]
        assert len(weights) == len(linears), "no weight is cut"
        return columns(x, self.leaves, *weights)

    def _row(self, linear: RowParallelLinear, x: Tensor) -> Tensor:
        assert linear.weight is not None, "the weight is not cut"
        return row(x, linear.weight, self.leaves)

    def _finished(self, linear: RowParallelLinear, parts: Tensor) -> Tensor:
        total = self.leaves.leave(parts)
        return total if linear.bias is None else total + linear.bias


def _in_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of each element of x, computed by whole vectors alone; a GPU has no others."""
    if on_gpu(x):
        return function(x)
    flat = x.flatten()
    return function(F.pad(flat, (0, -len(flat) % _VECTORS)))[: len(flat)].view(x.shape)
