"""The kernels over pages in Triton's interpreter, against plain attention of each sequence in float64."""

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from realhf.engine.generate.paged_attention import DecodeRows, LayerPages, TritonKernels
from realhf.gpu import paged_attention
from realhf.gpu.paged_attention import attend
from tests.unit.models.flash import IN_INTERPRETER

pytestmark = IN_INTERPRETER


def plain(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Attention of the last token of a sequence, [heads, head_dim] in float64, one head at a time.

    query [heads, head_dim], key and value [tokens, kv_heads, head_dim].
    """
    group, first = len(query) // key.shape[1], max(0, len(key) - (window or len(key)))
    out = []
    for head, q in enumerate(query.double()):
        k, v = (x[first:, head // group].double() for x in (key, value))
        out.append((k @ q / len(q) ** 0.5).softmax(0) @ v)
    return torch.stack(out)


class Sequences:
    """Sequences of so many tokens, the last of which is new; all others lie in pages of a shuffled table."""

    def __init__(self, lengths: list[int], kv_heads: int, group: int, head_dim: int, page: int, spare: int = 0):
        torch.manual_seed(sum(lengths) + 7 * kv_heads + head_dim)
        width = -(-max(lengths) // page) + spare
        self.query = torch.randn(len(lengths), kv_heads * group, head_dim)
        self.sequences = [torch.randn(2, length, kv_heads, head_dim) for length in lengths]
        count = len(lengths) * width
        self.pages = torch.full((2, count + 1, kv_heads, page, head_dim), float("nan"))
        self.table = torch.randperm(count).view(len(lengths), width).int()
        for row, sequence in enumerate(self.sequences):
            for place in range(lengths[row] - 1):
                self.pages[:, self.table[row, place // page], :, place % page] = sequence[:, place]
            self.table[row, -(-lengths[row] // page) :] = 10**6  # what lies behind the last page is not used
        self.lengths = torch.tensor(lengths, dtype=torch.int32) - 1
        self.new = torch.stack([sequence[:, -1] for sequence in self.sequences], 1)  # [2, rows, kv_heads, head_dim]

    def attend(self, window: int | None, dtype: torch.dtype = torch.float32) -> Tensor:
        self.pages, self.new, self.query = self.pages.to(dtype), self.new.to(dtype), self.query.to(dtype)
        return attend((self.pages[0], self.pages[1]), self.table, self.lengths, self.query, *self.new, window)

    def expected(self, window: int | None) -> Tensor:
        pairs = zip(self.query, self.sequences, strict=True)
        return torch.stack([plain(query, *sequence, window) for query, sequence in pairs])


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 6, 7, 8, 14]),
    head_dim=st.sampled_from([8, 16, 40, 64, 80, 96, 128, 256]),
    page=st.sampled_from([16, 64]),
    window=st.none() | st.integers(1, 160),
    spare=st.integers(0, 3),
    split=st.sampled_from([32, 64, 512]),
)
def test_a_step_attends_to_the_whole_sequence(
    lengths: list[int], kv_heads: int, group: int, head_dim: int, page: int, window: int | None, spare: int, split: int
) -> None:
    """And writes the new keys and values where the next step will read them, and nothing else."""
    sequences = Sequences(lengths, kv_heads, group, head_dim, page, spare)
    before, expected = sequences.pages.clone(), sequences.expected(window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "SPLIT_TOKENS", split)
        out = sequences.attend(window)
    assert (out.double() - expected).abs().max() < 2e-6
    for row, length in enumerate(lengths):
        place = sequences.table[row, (length - 1) // page], slice(None), (length - 1) % page
        before[:, *place] = sequences.new[:, row]
    assert torch.equal(sequences.pages.nan_to_num(9e9), before.nan_to_num(9e9))


@pytest.mark.parametrize("tokens", [512, 513, 514, 1024, 1025, 1100])
@pytest.mark.parametrize("window", [None, 512, 513, 88])
def test_splits_of_their_own_size(tokens: int, window: int | None) -> None:
    """Also where the new token is alone in the last of them, and the window begins with one."""
    sequences = Sequences([tokens, 3], kv_heads=1, group=2, head_dim=16, page=16)
    assert (sequences.attend(window).double() - sequences.expected(window)).abs().max() < 2e-6


def test_half_precision_is_as_exact_as_its_numbers() -> None:
    """In float16: the interpreter multiplies the bits of bfloat16 as whole numbers."""
    sequences = Sequences([40, 600], kv_heads=2, group=3, head_dim=64, page=16)
    out = sequences.attend(None, torch.float16)
    assert out.dtype == torch.float16
    assert (out.double() - sequences.expected(None)).abs().max() < 2e-3


def test_rows_of_queries_may_lie_apart() -> None:
    """As views of one product of query, key and value are."""
    sequences = Sequences([20, 33], kv_heads=2, group=2, head_dim=16, page=16)
    joined = torch.cat([sequences.query, *sequences.new], 1)  # [rows, heads + 2 kv_heads, head_dim]
    sequences.query, new = joined[:, :4], (joined[:, 4:6], joined[:, 6:])
    out = attend(
        (sequences.pages[0], sequences.pages[1]), sequences.table, sequences.lengths, sequences.query, *new, None
    )
    assert (out.double() - sequences.expected(None)).abs().max() < 2e-6


def test_a_row_depends_on_neither_its_company_nor_the_width_of_the_table() -> None:
    """Bit by bit, though a wider table has more splits."""
    sequences = Sequences([1100, 20, 513], kv_heads=1, group=6, head_dim=96, page=16)
    together = sequences.attend(None)
    for row, tokens in enumerate((1100, 20, 513)):
        own, width = slice(row, row + 1), -(-tokens // 16)
        alone = attend(
            (sequences.pages[0], sequences.pages[1]), sequences.table[own, :width], sequences.lengths[own],
            sequences.query[own], *sequences.new[:, own], None,
        )  # fmt: skip
        assert torch.equal(alone[0], together[row])


class Operators(TorchDispatchMode):
    """Notes torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(operator))
        return operator(*args, **(kwargs or {}))


def test_each_key_and_value_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of 7B (4 key heads for 28) at 1,024 tokens of context, as the engine asks for it: at most 1.1 times the
    cache's bytes are moved. Every row moves its own, so that one of 256 shows it."""
    from triton.runtime.interpreter import interpreter_builder

    moved = 0

    def count(name: str, masks: int) -> None:
        original = getattr(interpreter_builder, name)

        def call(pointers: Any, *arguments: Any) -> Any:
            nonlocal moved
            mask = arguments[masks].data
            moved += int(mask.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
            return original(pointers, *arguments)

        monkeypatch.setattr(interpreter_builder, name, call)

    count("create_masked_load", 0)
    count("create_masked_store", 1)
    sequences = Sequences([1025], kv_heads=4, group=7, head_dim=128, page=TritonKernels.page)
    keys, values = sequences.pages.half()
    key, value = sequences.new.half()
    rows = DecodeRows(sequences.table, sequences.lengths)
    given = LayerPages(keys, values), rows, sequences.query.half(), key, value, None
    TritonKernels().attend(*given)
    assert 1 < moved / (2 * 1024 * 4 * 128 * 2) < 1.1
    for kernel in ("attend_split", "join_splits"):
        monkeypatch.setattr(paged_attention, kernel, MagicMock())
    with Operators() as operators:
        TritonKernels().attend(*given)
    assert operators.names == {"aten.empty.memory_format"}  # nothing else moves anything
