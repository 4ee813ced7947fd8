"""Arena, boxes and initial weights: one contiguous store, the same model whatever the layout."""

import hashlib
from collections import Counter
from math import prod

import pytest
import torch

from benchmarks.lib.peak_memory import PeakMemory
from realhf.architecture.model import DecoderConfig
from realhf.engine.arena import Arena
from realhf.engine.build import attach_gradients, build_arena
from realhf.engine.residency.offload import allocate, free
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.parameters import decoder_parameters, parameter_count
from realhf.geometry.shards import FlatLayout, counted_range, units
from realhf.parallel.groups import ParallelGroups
from tests.unit.engine.decoder_boxes import boxes, build_decoder, initialise
from tests.unit.engine.losses import ONE_RANK, tiny

CPU = torch.device("cpu")
STRATEGIES = [ParallelStrategy(*degrees) for degrees in [(1, 1, 4), (1, 1, 3), (2, 1, 2), (1, 2, 1), (2, 2, 2)]]
CONFIGS = [tiny(), tiny(tied_embeddings=True), tiny(head="scalar", num_kv_heads=2)]


def ranks(strategy: ParallelStrategy) -> list[ParallelGroups]:
    """The ranks' places without process groups, which building a decoder does not talk in."""
    layout = Layout(DeviceMesh(0, strategy.size), strategy)
    return [ParallelGroups(layout, rank) for rank in range(strategy.size)]


def test_arena_views_are_aligned_and_disjoint() -> None:
    layout = FlatLayout({"a": (3, 5), "b": (), "c": (64,)}, shards=2)
    arena = Arena(layout, torch.float32, CPU)
    for i, view in enumerate(arena.views().values(), start=1):
        assert view.data_ptr() % 64 == arena.flat.data_ptr() % 64
        view.fill_(i)
    assert arena.flat.sum() == 1 * 15 + 2 + 3 * 64
    assert [layout.end(name) for name in "abc"] == [64, 128, 192]
    assert len(arena.flat) == layout.size == 256
    assert [layout.shard(i) for i in (0, 1)] == [range(0, 128), range(128, 256)]


def test_a_freed_arena_has_no_memory_and_its_views_come_back_with_it() -> None:
    arena = Arena(FlatLayout({"a": (3, 5), "b": (64,)}), torch.float32, CPU)
    views = arena.views()
    free(arena.flat)
    assert arena.flat.untyped_storage().nbytes() == 0
    allocate(arena.flat)
    arena.flat.fill_(2.0)
    assert views["a"].sum() == 2 * 15


def test_parameters_and_gradients_are_views_of_their_arenas() -> None:
    arena = build_arena(tiny(), ONE_RANK, torch.float32, CPU)
    decoder = build_decoder(tiny(), ONE_RANK, torch.float32, arena=arena)
    assert not any(p.requires_grad for p in decoder.parameters())
    arena.flat.fill_(2.0)
    assert all((p == 2.0).all() for p in decoder.parameters())
    gradients = Arena(arena.layout, torch.float32, CPU)
    attach_gradients(decoder, gradients)
    sum(p.sum() for p in decoder.parameters()).backward()
    sum(p.sum() for p in decoder.parameters()).backward()
    assert gradients.flat.sum() == 2 * parameter_count(tiny())


@pytest.mark.parametrize("config", CONFIGS, ids=["untied", "tied", "scalar"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_initial_weights_do_not_depend_on_the_layout(config: DecoderConfig, strategy: ParallelStrategy) -> None:
    whole = build_decoder(config, ONE_RANK, torch.float64)
    initialise(whole, seed=11)
    expected = {name: local for name, (_, local) in boxes(whole).items()}
    covered = Counter()
    for groups in ranks(strategy):
        decoder = build_decoder(config, groups, torch.float64)
        initialise(decoder, seed=11)
        for name, (box, local) in boxes(decoder).items():
            where = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            torch.testing.assert_close(local, expected[name][where], rtol=0, atol=0)
            covered[name] += box.size
    assert all(covered[spec.name] >= spec.size * strategy.dp for spec in decoder_parameters(config))


@pytest.mark.parametrize("config", CONFIGS, ids=["untied", "tied", "scalar"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_every_global_element_is_counted_once(config: DecoderConfig, strategy: ParallelStrategy) -> None:
    counted = {spec.name: torch.zeros(spec.shape) for spec in decoder_parameters(config)}
    for groups in ranks(strategy):
        arena = build_arena(config, groups, torch.float32, CPU)
        [unit] = units(config, groups.layout, groups.rank)
        part = counted_range(config, groups.layout, groups.rank, unit)
        arena.flat[part.start : part.stop] = 1.0
        for name, (box, local) in boxes(build_decoder(config, groups, torch.float32, arena=arena)).items():
            where = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            counted[name][where] += local
    assert all((count == 1).all() for count in counted.values())


def test_initial_weights_are_sensible_and_follow_the_seed() -> None:
    config = tiny(head="scalar", hidden_size=128)
    decoder = build_decoder(config, ONE_RANK, torch.float32)
    initialise(decoder, seed=1)
    local = {name: view for name, (_, view) in boxes(decoder).items()}
    assert (local["model.norm.weight"] == 1).all()
    assert local["model.layers.2.mlp.up_proj.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert local["model.layers.2.mlp.up_proj.weight"].mean().item() == pytest.approx(0, abs=1e-3)
    assert local["score.weight"].std().item() == pytest.approx(129**-0.5, rel=0.2)
    assert not torch.equal(local["model.layers.1.mlp.up_proj.weight"], local["model.layers.2.mlp.up_proj.weight"])
    trunk = local["model.embed_tokens.weight"].clone()
    head = local["score.weight"].clone()
    initialise(decoder, seed=2)
    assert not torch.equal(local["model.embed_tokens.weight"], trunk)
    assert not torch.equal(local["score.weight"], head)
    wide = build_decoder(config, ONE_RANK, torch.float64)
    initialise(wide, seed=1)
    assert torch.equal(boxes(wide)["score.weight"][1].float(), head)


@pytest.mark.parametrize("tp", [1, 2])
def test_large_parameters_are_drawn_in_parts(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch draws them whole, whatever the layout, and without the whole in memory."""
    config = tiny(vocab_size=320)
    groups = ParallelGroups(Layout(DeviceMesh(0, tp), ParallelStrategy(tp=tp)), tp - 1)
    decoder = build_decoder(config, groups, torch.float32)
    monkeypatch.setattr("realhf.engine.build._DRAWN_ELEMENTS", 16 * config.hidden_size)
    with PeakMemory() as memory:
        initialise(decoder, seed=3)
    largest = max(prod(spec.shape) for spec in decoder_parameters(config)) * 4
    assert 0 < memory.peak_bytes < largest / 2
    for box, local in boxes(decoder).values():
        spec = next(spec for spec in decoder_parameters(config) if spec.name == box.name)
        if spec.initial == "normal":
            digest = hashlib.blake2b(f"3/{spec.name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            whole = torch.randn(spec.shape, generator=generator) * 0.02
            where = tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))
            assert torch.equal(local, whole[where]), box
