"""The forward pass of this rank's stage on packed micro-batches, and the pipelined pass without gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from realhf.architecture.compute import Recomputed
from realhf.engine.batch import Batch
from realhf.engine.interface import Postprocess
from realhf.engine.packing import PackedMicroBatch, pack_micro_batch
from realhf.engine.pipeline import EndPass, Neighbours, run_forward
from realhf.engine.returned import check_columns
from realhf.geometry.pipeline_schedule import Pass
from realhf.models.decoder import KEEPS_ALL, Decoder
from realhf.parallel.sequence import TokenShards
from realhf.parallel.vocabulary import Logits


def run_stage(
    decoder: Decoder,
    micro_batch: PackedMicroBatch,
    hidden: Tensor | None,
    shards: TokenShards | None = None,
    recomputed: Recomputed = KEEPS_ALL,
    chunk: int = 0,
) -> Tensor | Logits:
    """A model chunk of this stage on `hidden` (on the tokens, the first chunk of the first stage).

    Returns hidden states [tokens, hidden] in the order of the packing (with `shards`: this rank's of them); on the last
    stage, the head's output in the order of the batch.
    """
    x = micro_batch.tokens if hidden is None else hidden
    return decoder(x, micro_batch.positions, micro_batch.attend, micro_batch.restore, shards, recomputed, chunk)


def pack_for(decoder: Decoder, sequences: Sequence[Tensor], device: torch.device) -> PackedMicroBatch:
    """Sequences [length] each, packed as the decoder computes them."""
    shares, in_order = decoder.shares_prefixes, decoder.leaves is not None
    return pack_micro_batch(sequences, device, shares_prefixes=shares, in_order=in_order)


@torch.no_grad()
def forward(
    decoder: Decoder,
    neighbours: Neighbours,
    batch: Batch,
    tokens_key: str,
    postprocess: Postprocess,
    micro_batches: int,
    end_pass: EndPass,
) -> dict[str, list[Tensor]]:
    """See `realhf.engine.interface.Model.forward`.

    Raises:
        InterfaceError: the result of `postprocess` breaks a rule, or is not finite.
    """
    places = batch.balanced(tokens_key, micro_batches)
    parts = [batch.select(chosen) for chosen in places]
    device = neighbours.like.device
    packed = [pack_for(decoder, part.data[tokens_key], device) for part in parts]
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

    run_forward(neighbours, [len(p.tokens) for p in packed], run, end_pass)
    return check_columns(
        {key: [values[place] for place in sorted(values)] for key, values in outputs.items()}, batch.ids, finite=True
    )
