"""The decoder against Hugging Face's Llama: logits, log-probabilities, gradients, one optimizer step."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.api.experiment import OptimizerConfig
from realhf.architecture.model import DecoderConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.model import ShardedModel
from tests.unit.engine.losses import (
    ONE_RANK,
    boxes_of,
    gradients_of,
    next_token_loss,
    random_batch,
    split_like,
    targets,
    tiny,
    trained_tokens,
)
from tests.unit.models.llama import llama, llama_logits

CONFIGS = {
    "plain": tiny(),
    "grouped queries": tiny(num_kv_heads=2),
    "one key head, odd layers": tiny(num_kv_heads=1, num_layers=3, rope_theta=500.0),
    "tied": tiny(tied_embeddings=True, rms_norm_eps=1e-3),
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
all_configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def build(config: DecoderConfig, dtype: torch.dtype, optimizer: OptimizerConfig | None = None) -> ShardedModel:
    model = ShardedModel(ModelSpec(config, ONE_RANK, dtype, optimizer=optimizer, total_optimizer_steps=10))
    model.initialise(seed=3)
    for name, (_, local) in boxes_of(model).items():
        # Larger weights and uneven norms than the initial ones: attention is then far from uniform.
        local.mul_(5.0) if local.dim() == 2 else local.copy_(torch.linspace(0.5, 1.5, len(local)).roll(len(name)))
    return model


def distance(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def oracle_loss(logits: Tensor, batch: Batch) -> Tensor:
    tokens, in_loss = targets(batch)
    return F.cross_entropy(logits[in_loss], tokens[in_loss])


@both_dtypes
@all_configs
def test_logits_and_token_logprobs(config: DecoderConfig, dtype: torch.dtype) -> None:
    model, batch = build(config, dtype), random_batch(config, 9)
    outputs = model.forward(batch, "tokens", split_like, micro_batches=3)["output"]
    with torch.no_grad():
        theirs = llama_logits(llama(config, model), batch.data["tokens"])
    ours = torch.cat(outputs)
    assert ours.dtype == dtype
    assert ours.std() > 0.5  # else the comparison says little
    assert distance(ours, theirs) < TOLERANCE[dtype]
    labels = targets(batch)[0][:, None]
    ours, theirs = (x.log_softmax(-1).gather(-1, labels) for x in (ours, theirs))
    assert (ours - theirs).abs().max() < TOLERANCE[dtype] * 10


@both_dtypes
@all_configs
def test_gradients(config: DecoderConfig, dtype: torch.dtype) -> None:
    model, batch = build(config, dtype, OPTIMIZER), random_batch(config, 8)
    hf = llama(config, model)
    oracle_loss(llama_logits(hf, batch.data["tokens"]), batch).backward()
    norm = torch.nn.utils.clip_grad_norm_(hf.parameters(), 1e9)
    stats = model.train_step(batch, "tokens", next_token_loss, trained_tokens, micro_batches=4)
    assert stats["grad_norm"][0] == pytest.approx(norm.item(), rel=TOLERANCE[dtype])
    theirs = dict(hf.named_parameters())
    ours = {box.name: gradient for box, gradient in gradients_of(model)}
    assert theirs.keys() == ours.keys()
    for name, gradient in ours.items():
        assert distance(gradient, theirs[name].grad) < TOLERANCE[dtype], name


@both_dtypes
@all_configs
def test_parameters_after_one_step(config: DecoderConfig, dtype: torch.dtype) -> None:
    model, batch = build(config, dtype, OPTIMIZER), random_batch(config, 8)
    hf = llama(config, model)
    before = {name: p.detach().clone() for name, p in hf.named_parameters()}
    adamw = torch.optim.AdamW(hf.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    loss = oracle_loss(llama_logits(hf, batch.data["tokens"]), batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(hf.parameters(), OPTIMIZER.max_grad_norm)
    adamw.step()
    stats = model.train_step(batch, "tokens", next_token_loss, trained_tokens, micro_batches=2)
    assert stats["lr"] == (1e-2, 1.0)
    assert stats["loss"][0] / stats["loss"][1] == pytest.approx(loss.item(), rel=TOLERANCE[dtype])
    ours = {name: local for name, (_, local) in boxes_of(model).items()}
    flat = {
        "ours": torch.cat([ours[name].flatten() for name in before]),
        "theirs": torch.cat([p.detach().flatten() for p in hf.parameters()]),
        "before": torch.cat([p.flatten() for p in before.values()]),
    }
    update = (flat["theirs"] - flat["before"]).norm()
    assert update / flat["before"].norm() > 1e-3
    # In float32, Adam's first step divides rounding by rounding where a gradient is nearly zero, so the
    # parameters themselves are compared; in float64 the update is.
    scale = update if dtype == torch.float64 else flat["theirs"].norm()
    assert (flat["ours"] - flat["theirs"]).norm() / scale < (1e-7 if dtype == torch.float64 else 1e-5)


def test_scalar_head_is_a_linear_on_the_final_norm() -> None:
    config = tiny(head="scalar")
    model, batch = build(config, torch.float64), random_batch(config, 4)
    values = torch.cat(model.forward(batch, "tokens", split_like, micro_batches=1)["output"])
    trunk = llama(tiny(), _with_lm_head(model))
    with torch.no_grad():
        hidden = torch.cat([trunk.model(input_ids=s[None]).last_hidden_state[0] for s in batch.data["tokens"]])
    weight = boxes_of(model)["score.weight"][1]
    assert distance(values, (hidden * weight).sum(-1)) < 1e-12


def _with_lm_head(scalar: ShardedModel) -> ShardedModel:
    model = ShardedModel(ModelSpec(tiny(), ONE_RANK, torch.float64))
    for name, (_, local) in boxes_of(model).items():
        if name != "lm_head.weight":
            local.copy_(boxes_of(scalar)[name][1])
    return model


def test_sequences_do_not_see_each_other_nor_the_future() -> None:
    config = tiny()
    model = build(config, torch.float64)
    batch = random_batch(config, 5, seed=1, lengths=(4, 9))
    before = model.forward(batch, "tokens", split_like, micro_batches=1)["output"]
    changed = [tokens.clone() for tokens in batch.data["tokens"]]
    changed[2][3] = (changed[2][3] + 1) % config.vocab_size
    after = model.forward(batch.with_data(tokens=changed), "tokens", split_like, micro_batches=1)["output"]
    for i in (0, 1, 3, 4):
        torch.testing.assert_close(after[i], before[i], rtol=0, atol=1e-12)
    torch.testing.assert_close(after[2][:3], before[2][:3], rtol=0, atol=1e-12)
    assert (after[2][3:] - before[2][3:]).abs().amax(-1).min() > 1e-3
