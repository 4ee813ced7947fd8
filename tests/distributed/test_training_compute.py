"""Sequence parallelism, recomputation and model chunks in all kinds of layouts: one AdamW step against transformers."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from realhf.api.experiment import OptimizerConfig
from realhf.architecture.compute import Computation
from realhf.architecture.model import DecoderConfig, Experts
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.model import ShardedModel
from realhf.geometry.boxes import Box
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.parallel.divergence import Target, generalised_jsd
from realhf.parallel.groups import GroupTable, ParallelGroups
from realhf.parallel.vocabulary import Logits, WholeLogits
from tests.distributed.pool import run_distributed
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
    value_loss,
)

pytestmark = pytest.mark.distributed

WORLD_SIZE, SAMPLES = 4, 8
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=1e9)
PLAIN = tiny()
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
WAYS = {
    "plain": Computation(),
    "full": Computation(recomputation="full"),
    "selective": Computation(recomputation="selective"),
    "sequence": Computation(sequence_parallel=True),
    "sequence full": Computation(sequence_parallel=True, recomputation="full"),
    "sequence selective": Computation(sequence_parallel=True, recomputation="selective"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    config: DecoderConfig = PLAIN
    dp: int = 1
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    micro_batches: int = 2
    compute: Computation = WAYS["plain"]
    # Every micro-batch has an odd number of tokens at least once; with up to 3, one may have fewer than ranks.
    lengths: tuple[int, int] = (2, 11)

    @property
    def layout(self) -> Layout:
        strategy = ParallelStrategy(self.dp, self.tp, self.pp, self.chunks)
        return Layout(DeviceMesh(0, strategy.size), strategy)

    @property
    def batch(self) -> Batch:
        return random_batch(self.config, SAMPLES, seed=1, lengths=self.lengths)


LAYOUTS = {
    "tp2": Case(tp=2, config=tiny(num_kv_heads=2)),
    "tp4": Case(tp=4),
    "pp2": Case(pp=2, micro_batches=4),
    "pp3 uneven": Case(pp=3, config=tiny(num_layers=5), micro_batches=4),
    "tp2 pp2": Case(tp=2, pp=2, micro_batches=4, config=tiny(num_layers=3)),
    "dp2 tp2": Case(dp=2, tp=2),
}
CASES = {
    f"{layout}, {way}": replace(case, compute=compute)
    for layout, case in LAYOUTS.items()
    for way, compute in WAYS.items()
    if case.tp > 1 or not compute.sequence_parallel
}
SEQUENCE = WAYS["sequence full"]
FIRST = Computation(recomputation="full", recomputed_layers=1)
CASES |= {
    "dp2 tp2, first": replace(LAYOUTS["dp2 tp2"], compute=FIRST),
    "pp3 uneven, first": replace(LAYOUTS["pp3 uneven"], compute=FIRST),
    "tp2, first": replace(LAYOUTS["tp2"], compute=replace(FIRST, sequence_parallel=True, recomputation="selective")),
    "pp2, 2 uneven chunks, first": Case(pp=2, chunks=2, config=tiny(num_layers=5), micro_batches=3, compute=FIRST),
}
CASES |= {
    "tied, tp2 pp2": Case(tp=2, pp=2, config=tiny(tied_embeddings=True), compute=SEQUENCE),
    "fewer tokens than ranks, tp4": Case(tp=4, lengths=(2, 4), micro_batches=8, compute=SEQUENCE),
    "fewer tokens than ranks, tp2 pp2": Case(tp=2, pp=2, lengths=(1, 3), micro_batches=8, compute=SEQUENCE),
    "scalar, tp2 pp2": Case(tp=2, pp=2, config=tiny(head="scalar"), compute=SEQUENCE),
    "scalar, tp4": Case(tp=4, config=tiny(head="scalar"), compute=WAYS["sequence"]),
    # Five layers: two in the first chunk of the first stage. Three micro-batches are no multiple of two stages.
    "pp2, 2 uneven chunks": Case(pp=2, chunks=2, config=tiny(num_layers=5), micro_batches=3),
    "tied, tp2 pp2, 2 chunks": Case(
        tp=2, pp=2, chunks=2, config=tiny(num_layers=4, tied_embeddings=True), micro_batches=4, compute=SEQUENCE
    ),
}

# Held against one rank, whose computation other tests hold against transformers.
FAMILIES = {
    "norms of heads, biases, windows": tiny(
        qk_norm=True, qkv_bias=True, attention_output_bias=True, mlp_bias=True, sliding_window=3, num_kv_heads=2
    ),
    "experts": tiny(experts=Experts(count=4, per_token=2)),
    "layer norms, learned positions": tiny(norm="layer", mlp="plain", positions="learned", max_positions=16),
}
CASES |= {
    f"{family}, tp2 pp2, {way}": Case(tp=2, pp=2, config=config, compute=WAYS[way])
    for family, config in FAMILIES.items()
    for way in ("plain", "sequence", "sequence full")
}


@dataclass
class Outcome:
    """What one rank saw in a case; gradients and parameters with the place of each in the whole."""

    outputs: list[np.ndarray]
    loss: float | None
    grad_norm: float | None
    gradients: dict[str, np.ndarray]
    parameters: dict[str, tuple[Box, np.ndarray]]


def built(
    config: DecoderConfig, groups: ParallelGroups, compute: Computation, dtype: torch.dtype = torch.float64
) -> ShardedModel:
    model = ShardedModel(ModelSpec(config, groups, dtype, optimizer=OPTIMIZER, compute=compute))
    model.initialise(seed=5)
    for box, local in model.residency.held():
        # Larger weights and uneven norms, so that attention is far from uniform.
        if len(box.shape) == 2:
            local.mul_(4.0)
        else:
            local.copy_(0.5 + (7 * torch.arange(box.offset[0], box.offset[0] + len(local)) + len(box.name)) % 32 / 32)
    return model


def run_case(case: Case, groups: ParallelGroups) -> Outcome:
    model = built(case.config, groups, case.compute)
    batch = case.batch.split(case.dp)[groups.dp_index]
    outputs = model.forward(batch, "tokens", split_like, case.micro_batches).get("output", [])
    loss = value_loss if case.config.head == "scalar" else next_token_loss
    stats = model.train_step(batch, "tokens", loss, trained_tokens, case.micro_batches)
    gradients = {box.name: view.numpy().copy() for box, view in gradients_of(model)}
    return Outcome(
        [output.numpy() for output in outputs],
        stats["loss"][0] if stats else None,
        stats["grad_norm"][0] if stats else None,
        gradients if case.dp == 1 else {},
        {name: (box, local.numpy().copy()) for name, (box, local) in boxes_of(model).items()},
    )


@dataclass
class Ranks:
    """What a rank gives back: its part of every case, and of the comparison of log-probabilities."""

    cases: dict[str, Outcome]
    vocabulary: dict[str, np.ndarray]


def run_all(rank: int) -> Ranks:
    tensor = Layout(DeviceMesh(0, WORLD_SIZE), ParallelStrategy(tp=WORLD_SIZE))
    table = GroupTable([tensor, *(case.layout for case in CASES.values())], rank)
    return Ranks(run_cases(CASES, table), part_of_vocabulary(table.groups(tensor)))


def run_cases(cases: dict[str, Case], table: GroupTable) -> dict[str, Outcome]:
    """Those of this rank."""
    return {
        name: run_case(case, table.groups(case.layout))
        for name, case in cases.items()
        if table.rank in case.layout.mesh.devices
    }


ROWS, VOCAB, HIDDEN, TEMPERATURE, BETA = 13, 20, 6, 0.8, 0.3


def vocabulary_inputs() -> list[torch.Tensor]:
    """hidden, weight, tokens, and factors of log-probability and entropy in a loss."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, HIDDEN), (VOCAB, HIDDEN), (ROWS,), (ROWS,))
    hidden, weight, *factors = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return [hidden.requires_grad_(), weight, torch.randint(VOCAB, (ROWS,), generator=generator), *factors]


def compared() -> dict[str, Target]:
    """Distributions to be compared with: of the whole vocabulary, and of five tokens anywhere in it."""
    logprob = torch.randn((ROWS, VOCAB), generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(
        -1
    )
    best, tokens = logprob.topk(5)
    others = (1 - best.exp().sum(-1, keepdim=True)).log()
    return {"whole": Target(logprob), "few": Target(torch.cat([best, others], -1), tokens)}


def part_of_vocabulary(groups: ParallelGroups) -> dict[str, np.ndarray]:
    hidden, weight, tokens, *factors = vocabulary_inputs()
    part = weight.chunk(WORLD_SIZE)[groups.tp_index].clone().requires_grad_()
    logits = Logits(hidden, part, groups.tensor, chunk_bytes=4 * len(part) * 8)
    result = logits.of_tokens(tokens, TEMPERATURE, with_entropy=True)
    (result.logprob * factors[0] + result.entropy * factors[1]).sum().backward()
    found = {"logprob": result.logprob, "entropy": result.entropy, "is_top": result.is_top, "hidden": hidden.grad}
    found |= {"weight": part.grad, "full": logits.full()}
    for name, target in compared().items():
        hidden, part = hidden.detach().requires_grad_(), part.detach().requires_grad_()
        logits = Logits(hidden, part, groups.tensor, chunk_bytes=4 * len(part) * 8)
        logsumexp = logits.of_tokens(tokens, TEMPERATURE).logsumexp
        divergence = generalised_jsd(logits, logsumexp, target, BETA, TEMPERATURE)
        (divergence * factors[0]).sum().backward()
        found |= {f"{name} divergence": divergence, f"{name} hidden": hidden.grad, f"{name} weight": part.grad}
    return {name: x.detach().numpy() for name, x in found.items()}


@pytest.fixture(scope="module")
def ranks() -> list[Ranks]:
    return run_distributed(run_all, WORLD_SIZE)


@dataclass
class Oracle:
    outputs: np.ndarray
    loss: float
    gradients: dict[str, np.ndarray]
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]


@cache
def alone(config: DecoderConfig, lengths: tuple[int, int]) -> Oracle:
    """What one rank computes with nothing divided or recomputed."""
    before = {
        name: local.numpy().copy() for name, (_, local) in boxes_of(built(config, ONE_RANK, WAYS["plain"])).items()
    }
    whole = run_case(Case(config=config, lengths=lengths, micro_batches=1), ONE_RANK)
    after = {name: local for name, (_, local) in whole.parameters.items()}
    return Oracle(np.concatenate(whole.outputs), whole.loss, whole.gradients, before, after)


@cache
def oracle(config: DecoderConfig, lengths: tuple[int, int]) -> Oracle:
    """transformers' model on single sequences and torch's AdamW; for a scalar head its trunk and a dot product."""
    from tests.unit.models.llama import llama, llama_logits  # slow to import, and not for the ranks

    batch = Case(config=config, lengths=lengths).batch
    model = built(config, ONE_RANK, Computation())
    before = {name: local.clone() for name, (_, local) in boxes_of(model).items()}
    tokens, in_loss = targets(batch)
    if config.head == "scalar":
        language_model = built(replace(config, head="lm"), ONE_RANK, Computation())
        for name, (_, local) in boxes_of(language_model).items():
            if name in before:
                local.copy_(before[name])
        hf = llama(language_model.config, language_model)
        score = torch.nn.Parameter(before["score.weight"].clone())
        hidden = torch.cat([hf.model(input_ids=s[None]).last_hidden_state[0] for s in batch.data["tokens"]])
        output = (hidden * score).sum(-1)
        loss = (output - tokens / 10.0)[in_loss].square().sum()
        named = {name: p for name, p in hf.named_parameters() if name in before} | {"score.weight": score}
    else:
        hf = llama(config, model)
        output = llama_logits(hf, batch.data["tokens"])
        loss = F.cross_entropy(output[in_loss], tokens[in_loss], reduction="sum")
        named = dict(hf.named_parameters())
    assert named.keys() == before.keys()
    optimizer = torch.optim.AdamW(named.values(), **ADAMW)
    (loss / in_loss.sum()).backward()
    gradients = {name: p.grad.numpy().copy() for name, p in named.items()}
    optimizer.step()
    after = {name: p.detach().numpy() for name, p in named.items()}
    return Oracle(
        output.detach().numpy(), loss.item(), gradients, {name: x.numpy() for name, x in before.items()}, after
    )


@pytest.mark.parametrize("name", CASES)
def test_one_step_is_that_of_transformers(name: str, ranks: list[Ranks]) -> None:
    case = CASES[name]
    check_step(case, {rank: ranks[rank].cases[name] for rank in case.layout.mesh.devices})


def check_step(case: Case, outcomes: dict[int, Outcome]) -> None:
    """Outputs, loss, gradients and parameters of all ranks against the oracle's."""
    expected = (alone if case.config in FAMILIES.values() else oracle)(case.config, case.lengths)
    layout = case.layout
    last = [layout.output_device(dp) for dp in range(case.dp)]
    outputs = np.concatenate([x for rank in last for x in outcomes[rank].outputs])
    assert relative(outputs, expected.outputs) < 1e-9
    assert sum(outcomes[rank].loss for rank in last) == pytest.approx(expected.loss, rel=1e-9)
    norm = np.sqrt(sum((g**2).sum() for g in expected.gradients.values()))
    assert all(outcomes[rank].grad_norm == pytest.approx(norm, rel=1e-9) for rank in last)

    update = np.sqrt(sum(((expected.after[n] - expected.before[n]) ** 2).sum() for n in expected.after))
    seen = set()
    for outcome in outcomes.values():
        for parameter, (box, local) in outcome.parameters.items():
            where = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            assert np.linalg.norm(local - expected.after[parameter][where]) < 1e-7 * update, parameter
            if outcome.gradients:
                difference = outcome.gradients[parameter] - expected.gradients[parameter][where]
                assert np.linalg.norm(difference) < 1e-7 * norm, parameter
            seen.add(parameter)
    assert seen == expected.after.keys()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputation_changes_no_bit(layout: str, ranks: list[Ranks]) -> None:
    compared = 0
    for kept, *recomputed in (("plain", "full", "selective"), ("sequence", "sequence full", "sequence selective")):
        for rank in ranks:
            expected = rank.cases.get(f"{layout}, {kept}")
            for way in recomputed if expected else ():
                got = rank.cases[f"{layout}, {way}"].parameters
                for name, (_, local) in expected.parameters.items():
                    np.testing.assert_array_equal(got[name][1], local, err_msg=f"{name}, {way}")
                    compared += 1
    assert compared > 0


PLAIN_OF = {
    "dp2 tp2, first": "dp2 tp2, plain",
    "pp3 uneven, first": "pp3 uneven, plain",
    "tp2, first": "tp2, sequence",
    "pp2, 2 uneven chunks, first": "pp2, 2 uneven chunks",
}


@pytest.mark.parametrize("first", PLAIN_OF)
def test_recomputing_the_first_layers_changes_no_bit(first: str, ranks: list[Ranks]) -> None:
    for rank in CASES[first].layout.mesh.devices:
        expected, found = (ranks[rank].cases[name].parameters for name in (PLAIN_OF[first], first))
        for name, (_, local) in expected.items():
            np.testing.assert_array_equal(found[name][1], local, err_msg=name)


def test_replicas_hold_the_same_bits(ranks: list[Ranks]) -> None:
    for name in CASES:
        seen: dict[Box, np.ndarray] = {}
        for outcome in ranks:
            for box, local in outcome.cases[name].parameters.values() if name in outcome.cases else ():
                np.testing.assert_array_equal(local, seen.setdefault(box, local), err_msg=f"{box} of {name}")


def test_log_probabilities_from_parts_of_the_vocabulary(ranks: list[Ranks]) -> None:
    hidden, weight, tokens, *factors = vocabulary_inputs()
    weight.requires_grad_()
    full = F.linear(hidden, weight)
    logprob = -F.cross_entropy(full / TEMPERATURE, tokens, reduction="none")
    entropy = torch.distributions.Categorical(logits=full / TEMPERATURE).entropy()
    (logprob * factors[0] + entropy * factors[1]).sum().backward()
    parts = [rank.vocabulary for rank in ranks]
    for part in parts:
        np.testing.assert_allclose(part["logprob"], logprob.detach(), rtol=1e-12)
        np.testing.assert_allclose(part["entropy"], entropy.detach(), rtol=1e-12)
        np.testing.assert_allclose(part["full"], full.detach(), rtol=1e-12)
        np.testing.assert_array_equal(part["is_top"], (full.argmax(-1) == tokens).numpy())
        np.testing.assert_array_equal(part["logprob"], parts[0]["logprob"])
    # Each rank has the part of the gradient that comes through its vocabulary.
    np.testing.assert_allclose(sum(part["hidden"] for part in parts), hidden.grad, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(np.concatenate([part["weight"] for part in parts]), weight.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["whole", "few"])
def test_divergences_from_parts_of_the_vocabulary(ranks: list[Ranks], name: str) -> None:
    hidden, weight, tokens, factor, _ = vocabulary_inputs()
    weight.requires_grad_()
    logits = WholeLogits(F.linear(hidden, weight))
    logsumexp = logits.of_tokens(tokens, TEMPERATURE).logsumexp
    expected = generalised_jsd(logits, logsumexp, compared()[name], BETA, TEMPERATURE)
    (expected * factor).sum().backward()
    parts = [rank.vocabulary for rank in ranks]
    for part in parts:
        np.testing.assert_allclose(part[f"{name} divergence"], expected.detach(), rtol=1e-10)
        np.testing.assert_array_equal(part[f"{name} divergence"], parts[0][f"{name} divergence"])
    found = sum(part[f"{name} hidden"] for part in parts), np.concatenate([part[f"{name} weight"] for part in parts])
    for mine, theirs in zip(found, (hidden.grad, weight.grad), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12)


def relative(ours: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(ours - expected) / np.linalg.norm(expected))
