"""What sequences begin with alike is computed once: which rows they share, and the same numbers as without."""

import pytest
import torch
from torch import Tensor

from realhf.architecture.model import DecoderConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.forward import run_stage
from realhf.engine.model import ShardedModel
from realhf.engine.packing import SharedPrefix, pack_micro_batch, shared_prefixes
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.models.prefixed_attention import PrefixedAttention
from realhf.parallel.groups import ParallelGroups

CPU = torch.device("cpu")
CONFIG = DecoderConfig(
    hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=50, qk_norm=True
)


def sequences(*groups: tuple[int, list[int]], seed: int = 0) -> list[Tensor]:
    """For every (prompt tokens, response tokens): responses to one random prompt, which differ from their start."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for prompt, responses in groups:
        begin = torch.randint(50, (prompt,), generator=generator)
        for i, response in enumerate(responses):
            own = torch.randint(50, (response,), generator=generator)
            own[0] = i
            found.append(torch.cat([begin, own]))
    return found


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([(9, [3, 4]), (12, [2]), (8, [1, 1, 1])], [(range(2), 9), (range(3, 6), 8)]),
        ([(7, [3, 4])], []),  # too short to be worth it
        ([(9, [3]), (9, [3])], []),
    ],
)
def test_neighbours_that_begin_alike_are_found(groups, expected) -> None:
    assert shared_prefixes(sequences(*groups)) == [SharedPrefix(*each) for each in expected]


def test_a_run_grows_where_that_saves_rows_and_every_member_keeps_a_token() -> None:
    same = torch.arange(20)
    assert shared_prefixes([same, same, same]) == [SharedPrefix(range(3), 19)]
    longer = torch.cat([same[:10], same[:5] + 30])
    # Two that share 19 tokens and a third that shares 10 of them: 20 rows saved, not 19.
    assert shared_prefixes([same, same, longer]) == [SharedPrefix(range(3), 10)]
    shorter = torch.cat([same[:9], same[:5] + 30])
    assert shared_prefixes([same, same, shorter]) == [SharedPrefix(range(2), 19)]


@pytest.mark.parametrize(
    "groups",
    [
        [(9, [3, 4, 3, 3])],
        [(9, [3, 4]), (12, [2]), (8, [1, 1, 1]), (9, [4, 3]), (9, [5])],
        [(40, [30, 20, 30]), (40, [30, 30]), (40, [7])],
    ],
)
def test_shared_rows_give_the_same_outputs_and_gradients(groups) -> None:
    given = sequences(*groups)
    apart, together = pack_micro_batch(given, CPU), pack_micro_batch(given, CPU, shares_prefixes=True)
    assert isinstance(together.attend, PrefixedAttention)
    assert together.restore is not None
    assert together.tokens[together.restore].tolist() == torch.cat(given).tolist()
    assert together.positions[together.restore].tolist() == [i for s in given for i in range(len(s))]
    assert sum(together.attend.lengths) == len(together.tokens) < len(apart.tokens)
    model = ShardedModel(
        ModelSpec(CONFIG, ParallelGroups(Layout(DeviceMesh(0, 1), ParallelStrategy()), 0), torch.float64)
    )
    model.initialise(0)
    parameters = [p.requires_grad_() for p in model.decoder.parameters()]
    expected, actual = (run_stage(model.decoder, packed, None).full() for packed in (apart, together))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    weights = torch.randn(actual.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        torch.autograd.grad((actual * weights).sum(), parameters),
        torch.autograd.grad((expected * weights).sum(), parameters),
        rtol=1e-10, atol=1e-10,
    )  # fmt: skip


def test_attention_with_windows_shares_nothing() -> None:
    for window, shares in ((None, True), (4, False)):
        config = DecoderConfig(**{**vars(CONFIG), "sliding_window": window})
        spec = ModelSpec(config, ParallelGroups(Layout(DeviceMesh(0, 1), ParallelStrategy()), 0), torch.float64)
        assert ShardedModel(spec).decoder.shares_prefixes is shares


def test_without_shared_prefixes_the_packing_is_that_of_before() -> None:
    given = sequences((9, [3]), (12, [2]))
    apart, together = pack_micro_batch(given, CPU), pack_micro_batch(given, CPU, shares_prefixes=True)
    assert together.tokens.tolist() == apart.tokens.tolist()
    assert not isinstance(together.attend, PrefixedAttention)
