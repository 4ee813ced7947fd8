"""megatron-core under the native parameters: names, fused layouts, refusals, and its layers on the CPU."""

import importlib.util
import subprocess
import sys
import warnings
from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from realhf.api.experiment import ModelSetup, OptimizerConfig
from realhf.architecture.compute import Computation
from realhf.architecture.model import DecoderConfig, Experts
from realhf.base.errors import UserError
from realhf.engine import megatron_backend as megatron
from realhf.engine import megatron_check
from realhf.engine.backend import ModelSpec, build_model
from realhf.engine.model import ShardedModel
from realhf.geometry.layout import ParallelStrategy
from realhf.geometry.parameters import decoder_parameters
from tests.unit.engine.losses import ONE_RANK, next_token_loss, random_batch, tiny, trained_tokens
from tests.waiting import PATIENCE_S

FAMILIES = {
    "llama": tiny(),
    "grouped, biases": tiny(num_kv_heads=2, qkv_bias=True),
    "head norms, heads of their own size": tiny(num_kv_heads=1, qk_norm=True, attention_head_dim=16),
    "windows": tiny(num_kv_heads=2, sliding_window=3),
}


def layer_weights(config: DecoderConfig) -> dict[str, Tensor]:
    prefix = "model.layers.0."
    specs = [spec for spec in decoder_parameters(config) if spec.name.startswith(prefix)]
    torch.manual_seed(0)
    return {spec.name.removeprefix(prefix): torch.randn(spec.shape) for spec in specs}


def from_megatron(weights: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """The inverse of `to_megatron`."""
    own = {ours: weights[theirs] for ours, theirs in megatron._SAME.items() if theirs in weights}
    rows = [config.num_heads // config.num_kv_heads * config.head_dim, config.head_dim, config.head_dim]
    for kind in ("weight", "bias"):
        if (name := f"self_attention.linear_qkv.{kind}") in weights:
            parts = weights[name].unflatten(0, (config.num_kv_heads, -1)).split(rows, dim=1)
            own |= {f"self_attn.{n}_proj.{kind}": x.flatten(0, 1) for n, x in zip("qkv", parts, strict=True)}
    own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"] = weights[megatron._FC1].chunk(2)
    return own


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_every_parameter_comes_back(config):
    weights = layer_weights(config)
    fused = megatron.to_megatron(weights, config)
    assert sum(x.numel() for x in fused.values()) == sum(x.numel() for x in weights.values())
    back = from_megatron(fused, config)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_the_fused_layout_by_hand():
    """Four query heads q0 to q3 of two numbers, two key-value heads: q0 q1 k0 v0, then q2 q3 k1 v1."""
    config = tiny(hidden_size=8, num_kv_heads=2, intermediate_size=1, qkv_bias=True)
    weights = layer_weights(config)
    rows = {"q": list(range(8)), "k": list(range(10, 14)), "v": list(range(20, 24))}
    for name, numbers in rows.items():
        weights[f"self_attn.{name}_proj.bias"] = torch.tensor(numbers)
        weights[f"self_attn.{name}_proj.weight"] = torch.tensor(numbers)[:, None].expand(-1, 8)
    weights["mlp.gate_proj.weight"], weights["mlp.up_proj.weight"] = torch.zeros(1, 8), torch.ones(1, 8)
    fused = megatron.to_megatron(weights, config)
    order = [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]
    assert fused["self_attention.linear_qkv.bias"].tolist() == order
    assert fused["self_attention.linear_qkv.weight"][:, 3].tolist() == order
    assert fused["mlp.linear_fc1.weight"][:, 0].tolist() == [0, 1]  # the gate first


def test_gradients_pass_through_the_fused_layout():
    config = FAMILIES["grouped, biases"]
    weights = {name: x.requires_grad_() for name, x in layer_weights(config).items()}
    total = sum((x * x).sum() for x in megatron.to_megatron(weights, config).values())
    grads = torch.autograd.grad(total, list(weights.values()))
    assert all(torch.equal(grad, 2 * x) for grad, x in zip(grads, weights.values(), strict=True))


def test_what_is_refused(monkeypatch):
    one = ParallelStrategy()
    spec = ModelSpec(tiny(), ONE_RANK, torch.float32, optimizer=OptimizerConfig(lr=1e-3))
    with pytest.raises(UserError, match="needs a GPU, and the model is on cpu; run it on one, or choose native"):
        build_model("megatron", spec)
    with pytest.raises(UserError, match="backend='mega' is not known; choose one of native, "):
        ModelSetup(backend="mega")
    for config in (tiny(norm="layer"), tiny(mlp_bias=True), tiny(experts=Experts(count=2, per_token=1))):
        with pytest.raises(UserError, match="choose native for this model"):
            megatron_check.check_architecture(config)
    with pytest.raises(UserError, match="tp=2, pp=1"):
        megatron_check.check_megatron(tiny(), ParallelStrategy(tp=2), "cuda")
    megatron_check.check_megatron(tiny(), one, "cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'realhf\[gpu\]'"):
        megatron_check.check_megatron(tiny(), one, "cuda")


@pytest.mark.slow
def test_nothing_loads_it_unless_asked():
    code = """
import importlib, pkgutil, sys, realhf
for module in pkgutil.walk_packages(realhf.__path__, "realhf."):
    # A library that processes load before Python starts is no module.
    if not module.name.endswith("__main__") and module.name != "realhf.machine._aligned":
        importlib.import_module(module.name)
assert "realhf.engine.megatron_backend" in sys.modules
assert not [name for name in sys.modules if name.split(".")[0] in ("megatron", "flash_attn", "transformer_engine")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("recomputation", ["off", "full"])
def test_a_training_step_is_the_native_one(alone, config, recomputation):
    """Its local layers run on a CPU too: float64, gradients and the parameters after three steps."""
    native, ours = (model_of(config, recomputation) for _ in range(2))
    with warnings.catch_warnings(action="error"):  # into the logs of a run
        ours.decoder.trains_layer = megatron.MegatronLayers(config, torch.float64)
    batch = random_batch(config, 6)
    for _ in range(3):
        stats = [m.train_step(batch, "tokens", next_token_loss, trained_tokens, 2) for m in (native, ours)]
        assert stats[0]["loss"] == pytest.approx(stats[1]["loss"], rel=1e-10)
        assert stats[0]["grad_norm"] == pytest.approx(stats[1]["grad_norm"], rel=1e-9)
    torch.testing.assert_close(ours.parameters.flat, native.parameters.flat, rtol=0, atol=1e-9)


@pytest.fixture
def alone(tmp_path):
    """A world of one process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model_of(config: DecoderConfig, recomputation: str) -> ShardedModel:
    compute = Computation(recomputation=recomputation)
    optimizer = OptimizerConfig(lr=1e-3)
    model = ShardedModel(
        ModelSpec(config, ONE_RANK, torch.float64, optimizer=optimizer, total_optimizer_steps=3, compute=compute)
    )
    model.initialise(0)
    return model
