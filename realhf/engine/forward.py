"""The forward pass of this rank's stage on packed micro-batches, and the pipelined pass without gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.architecture.compute import Recomputation
from realhf.engine.batch import Batch
from realhf.engine.interface import Postprocess
from realhf.engine.pipeline import Neighbours, run_forward
from realhf.engine.returned import check_columns
from realhf.geometry.pipeline_schedule import Pass
from realhf.models.attention import PackedAttention
from realhf.models.decoder import Decoder
from realhf.parallel.sequence import TokenShards
from realhf.parallel.vocabulary import Logits

# On the CPU, oneDNN makes a kernel for every number of rows that it has not seen: some milliseconds for the products of
# a layer, each time that lengths add up to something new. Up to so many rows, numbers are rounded up to multiples.
_EXACT_ROWS = 64
_FINE_ROWS, _FINE_MULTIPLE, _COARSE_MULTIPLE = 512, 32, 64


@dataclass(frozen=True)
class PackedMicroBatch:
    """Sequences packed in order of length, so that attention takes equal lengths as one slice.

    In front of them there may be padding: sequences of one token. `tokens` and `positions` are [rows]; `restore`
    [tokens] holds, for every token in the order of the batch, its row in the packing (None where all rows are
    tokens and the two orders agree).
    """

    tokens: Tensor
    positions: Tensor
    restore: Tensor | None
    attend: PackedAttention


def pack_micro_batch(sequences: Sequence[Tensor], device: torch.device) -> PackedMicroBatch:
    """Packs tensors [length] of tokens; none may be empty."""
    places = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    in_order = [sequences[i] for i in places]
    lengths = torch.tensor([len(s) for s in in_order])
    total = int(lengths.sum())
    padding = _padding(total) if device.type == "cpu" else 0
    starts = padding + lengths.cumsum(0) - lengths
    positions = torch.arange(padding, padding + total) - starts.repeat_interleave(lengths)
    restore = None
    if padding or places != sorted(places):
        back = torch.tensor(places).argsort()  # place in the batch -> place in the packing
        lengths_back = lengths[back]
        ends_back = lengths_back.cumsum(0)
        within = torch.arange(total) - (ends_back - lengths_back).repeat_interleave(lengths_back)
        restore = (starts[back].repeat_interleave(lengths_back) + within).to(device)
    none = in_order[0].new_zeros(padding)
    return PackedMicroBatch(
        torch.cat([none, *in_order]).to(device),
        torch.cat([positions.new_zeros(padding), positions]).to(device),
        restore,
        PackedAttention([1] * padding + lengths.tolist()),
    )


def _padding(tokens: int) -> int:
    """Rows to add to so many tokens."""
    if tokens <= _EXACT_ROWS:
        return 0
    return -tokens % (_FINE_MULTIPLE if tokens <= _FINE_ROWS else _COARSE_MULTIPLE)


def run_stage(
    decoder: Decoder,
    micro_batch: PackedMicroBatch,
    hidden: Tensor | None,
    shards: TokenShards | None = None,
    recomputation: Recomputation = "off",
    chunk: int = 0,
) -> Tensor | Logits:
    """A model chunk of this stage on `hidden` (on the tokens, the first chunk of the first stage).

    Returns hidden states [tokens, hidden] in the order of the packing (with `shards`: this rank's of them); of the
    model's last layers the head's output in the order of the batch.
    """
    x = micro_batch.tokens if hidden is None else hidden
    return decoder(x, micro_batch.positions, micro_batch.attend, micro_batch.restore, shards, recomputation, chunk)


@torch.no_grad()
def forward(
    decoder: Decoder,
    neighbours: Neighbours,
    batch: Batch,
    tokens_key: str,
    postprocess: Postprocess,
    micro_batches: int,
) -> dict[str, list[Tensor]]:
    """See `realhf.engine.interface.Model.forward`.

    Raises:
        InterfaceError: what `postprocess` gave breaks a rule, or is not finite.
    """
    places = batch.balanced(tokens_key, micro_batches)
    parts = [batch.select(chosen) for chosen in places]
    packed = [pack_micro_batch(part.data[tokens_key], neighbours.like.device) for part in parts]
    outputs: dict[str, dict[int, Tensor]] = {}  # by place in the batch

    def run(forward: Pass, hidden: Tensor | None) -> Tensor | None:
        i = forward.micro_batch
        output = run_stage(decoder, packed[i], hidden, chunk=forward.chunk)
        if not decoder.has_head(forward.chunk):
            assert isinstance(output, Tensor)
            return output
        columns = check_columns(postprocess(output, parts[i]), parts[i].ids, finite=False)
        for key, values in columns.items():
            outputs.setdefault(key, {}).update(zip(places[i], values, strict=True))
        return None

    run_forward(neighbours, [len(p.tokens) for p in packed], run)
    return check_columns(
        {key: [values[place] for place in sorted(values)] for key, values in outputs.items()}, batch.ids, finite=True
    )
