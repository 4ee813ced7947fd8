"""Training by megatron-core's layers on a GPU, against the native engine on the same GPU and on the CPU."""

import pytest
import torch
import torch.distributed as dist

from realhf.api.experiment import OptimizerConfig
from realhf.engine.backend import ModelSpec, build_model
from tests.unit.engine.losses import ONE_RANK, next_token_loss, random_batch, tiny, trained_tokens

pytestmark = pytest.mark.gpu
CONFIG = tiny(hidden_size=256, num_heads=4, num_kv_heads=2, intermediate_size=512, qkv_bias=True)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.bfloat16, 2e-2)])
def test_steps_are_those_of_the_native_engine(tmp_path, dtype, tolerance):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    losses = {
        (device, backend): train(device, backend, dtype)
        for device, backend in (("cpu", "native"), ("cuda", "native"), ("cuda", "megatron"))
    }
    dist.destroy_process_group()
    expected = losses.pop(("cpu", "native"))
    for actual in losses.values():
        assert actual == pytest.approx(expected, rel=tolerance)


def train(device: str, backend: str, dtype: torch.dtype) -> list[float]:
    """Loss and norm of the gradient of three steps."""
    optimizer = OptimizerConfig(lr=1e-3)
    spec = ModelSpec(CONFIG, ONE_RANK, dtype, device, optimizer=optimizer, total_optimizer_steps=3)
    model = build_model(backend, spec)
    model.initialise(0)
    batch = random_batch(CONFIG, 6, lengths=(10, 60)).to(torch.device(device))
    numbers = []
    for _ in range(3):
        stats = model.train_step(batch, "tokens", next_token_loss, trained_tokens, 2)
        numbers += [stats["loss"][0] / stats["loss"][1], stats["grad_norm"][0]]
    return numbers
