"""Every family under layouts against transformers: logits, gradient norm, parameters after a step; saved boxes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from realhf.architecture.compute import Computation
from realhf.models.checkpoint import CheckpointReader
from realhf.models.checkpoint_index import finish
from tests.distributed.family_ranks import OPTIMIZER, SAMPLES, Case, Outcome, run_cases
from tests.distributed.pool import run_distributed
from tests.unit.engine.losses import random_batch, targets
from tests.unit.models.families import FAMILIES, Oracle, config_class, oracle, whole_box

pytestmark = pytest.mark.distributed

WORLD_SIZE = 4
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,  # over three stages: 2, 1 and 1
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 24,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
CHANGES = {
    "llama": {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 5},
    "qwen2": {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "qwen3": {"head_dim": 6},
    "gemma": {"head_dim": 6, "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
}
GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32, "vocab_size": 24, "tie_word_embeddings": True}

SEQUENCE = Computation(sequence_parallel=True, recomputation="full")
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "pp2": {"pp": 2},
    "pp3": {"pp": 3},
    "dp2": {"dp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "tp2 sequence": {"tp": 2, "compute": SEQUENCE},
    "tp4 sequence": {"tp": 4, "compute": SEQUENCE},
    "tp2 pp2 sequence": {"tp": 2, "pp": 2, "compute": SEQUENCE},
    "fsdp2": {"dp": 2, "compute": Computation(data_parallel="fsdp")},
}
ALL_CASES = {f"{family} {name}": Case(family=family, **sizes) for family in FAMILIES for name, sizes in LAYOUTS.items()}
# Every family, and every layout, at least once.
CASES = {
    name: ALL_CASES[name]
    for i, family in enumerate(FAMILIES)
    for name in (f"{family} {list(LAYOUTS)[j % len(LAYOUTS)]}" for j in (i, i + 5))
}


@dataclass
class Expected:
    """What transformers computes on the whole batch."""

    logits: list[np.ndarray]
    grad_norm: float
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]


def expected(theirs: Oracle) -> Expected:
    batch = random_batch(theirs.config, SAMPLES, lengths=(2, 20))
    logits = theirs.logits(batch.data["tokens"])
    tokens, in_loss = targets(batch)
    F.cross_entropy(logits[in_loss], tokens[in_loss]).backward()
    before = theirs.state("before")
    norm = torch.nn.utils.clip_grad_norm_(theirs.hf.parameters(), OPTIMIZER.max_grad_norm)
    torch.optim.AdamW(theirs.hf.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1).step()
    return Expected(
        [x.numpy() for x in logits.detach().split([len(t) for t in batch.data["tokens"]])],
        norm.item(),
        {name: tensor.numpy() for name, tensor in before.items()},
        {name: tensor.numpy() for name, tensor in theirs.state("after").items()},
    )


def check(root: Path, cases: dict[str, Case]) -> None:
    oracles = {}
    for family in {case.family: None for case in cases.values()}:
        config = config_class(family)(**(GPT2 if family == "gpt2" else SIZES | CHANGES[family]))
        oracles[family] = oracle(config, root / family, torch.float64)
    outcomes = run_distributed(run_cases, WORLD_SIZE, str(root), cases)
    wanted = {family: expected(theirs) for family, theirs in oracles.items()}
    for name, case in cases.items():
        check_case(name, case, [ranks[name] for ranks in outcomes if name in ranks], wanted[case.family])
        check_saved(root / "saved" / name, case, oracles[case.family], wanted[case.family])


def check_case(name: str, case: Case, outcomes: list[Outcome], wanted: Expected) -> None:
    update = np.sqrt(sum(((wanted.after[n] - wanted.before[n]) ** 2).sum() for n in wanted.before))
    assert update > 0.1
    for rank, outcome in enumerate(outcomes):
        dp, _, stage = case.layout.coordinates(rank)
        if stage == case.pp - 1:
            own = wanted.logits[dp * SAMPLES // case.dp : (dp + 1) * SAMPLES // case.dp]
            assert relative(np.concatenate(outcome.logits), np.concatenate(own)) < 1e-12, name
            assert outcome.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-9), name
        square = 0.0
        for box, local in outcome.parameters:
            whole = wanted.after[box.name]
            square += ((local - whole[box.slices_in(whole_box(box.name, whole.shape))]) ** 2).sum()
        assert np.sqrt(square) / update < 1e-7, (name, rank)


def check_saved(directory: Path, case: Case, theirs: Oracle, wanted: Expected) -> None:
    """What was loaded under the layout and saved as boxes, read whole: the very bits of the checkpoint."""
    finish(directory, theirs.config, "float64", case.owners(theirs.config))
    reader = CheckpointReader(directory)
    reader.check_architecture(theirs.config)
    for name, tensor in wanted.before.items():
        np.testing.assert_array_equal(reader.read(whole_box(name, tensor.shape)).numpy(), tensor)


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def test_families_under_layouts(tmp_path: Path) -> None:
    """Two layouts a family, other ones for each: what the test below, which takes minutes, does for all pairs."""
    assert {case.family for case in CASES.values()} == set(FAMILIES)
    assert {name.partition(" ")[2] for name in CASES} == set(LAYOUTS)
    check(tmp_path, CASES)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_under_every_layout(family: str, tmp_path: Path) -> None:
    check(tmp_path, {name: case for name, case in ALL_CASES.items() if case.family == family})
