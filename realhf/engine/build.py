"""From a configuration and a place in a layout to a decoder whose parameters lie in one arena."""

import hashlib
from collections.abc import Iterable, Iterator
from math import prod

import torch
from torch import Tensor, nn

from realhf.architecture.model import DecoderConfig
from realhf.engine.arena import Arena
from realhf.geometry.boxes import Box
from realhf.geometry.parameters import ParameterSpec, decoder_parameters
from realhf.geometry.shards import flat_layout
from realhf.models.decoder import Decoder
from realhf.parallel.gradients import let_add_to_grad
from realhf.parallel.groups import ParallelGroups
from realhf.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from realhf.realloc.execute.held import by_name

_INITIAL_STD = 0.02
_DRAWN_ELEMENTS = 2**20  # at a time


def build_arena(config: DecoderConfig, groups: ParallelGroups, dtype: torch.dtype, device: torch.device) -> Arena:
    """The storage of this rank's parameters, in the order of `realhf.geometry.shards.flat_layout`; zeros."""
    return Arena(flat_layout(config, groups.layout, groups.rank), dtype, device)


def decoder_on(config: DecoderConfig, groups: ParallelGroups, views: dict[str, Tensor]) -> Decoder:
    """This rank's part of a model, whose parameters are `views`, by name: `NAME.slices.0.weight` and so on of a weight
    that is cut. They need no gradient until `attach_gradients`."""
    slices: dict[str, dict[int, tuple[int, ...]]] = {}
    for name, view in views.items():  # in the order of the units, which modes mix
        owner, is_cut, place = name.partition(".slices.")
        if is_cut:
            slices.setdefault(owner, {})[int(place.partition(".")[0])] = tuple(view.shape)
    with torch.device("meta"):
        decoder = Decoder(config, groups)
        for owner, shapes in slices.items():
            operator = decoder.get_submodule(owner)
            assert isinstance(operator, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding)
            operator.cut([shapes[number] for number in range(len(shapes))])
    views = dict(views)
    for name, placeholder in list(decoder.named_parameters()):
        owner, leaf = name.rsplit(".", 1)
        assert placeholder.shape == views[name].shape, f"{name}: {placeholder.shape} is not {views[name].shape}"
        setattr(decoder.get_submodule(owner), leaf, nn.Parameter(views.pop(name), requires_grad=False))
    assert not views, f"the decoder lacks {sorted(views)}"
    return decoder


def attach_gradients(decoder: Decoder, gradients: Arena) -> None:
    """Makes every `.grad` a view of `gradients`, into which backward passes then add, in its dtype."""
    views = gradients.views()
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(True)
        parameter.grad_dtype = gradients.flat.dtype
        parameter.grad = views[name]
        let_add_to_grad(parameter)


def fill_initial(config: DecoderConfig, held: Iterable[tuple[Box, Tensor]], seed: int) -> None:
    """Fills tensors with their boxes' part of the random weights of `seed`.

    Every global parameter is drawn in float32 from a generator keyed by the seed and its name, some rows after
    others, and cut: the weights depend neither on the layout nor on the other parameters.
    """
    specs = {spec.name: spec for spec in decoder_parameters(config)}
    for name, of_name in by_name(held).items():
        for drawn, values in _initial_rows(specs[name], seed):
            for box, local in of_name:
                common = box.intersect(drawn)
                if common is not None:
                    local[common.slices_in(box)].copy_(values[common.slices_in(drawn)])


def initial_value(spec: ParameterSpec, seed: int) -> Tensor:
    """The whole initial parameter of `fill_initial`, float32 on the CPU."""
    return torch.cat([values for _, values in _initial_rows(spec, seed)])


def _initial_rows(spec: ParameterSpec, seed: int) -> Iterator[tuple[Box, Tensor]]:
    """Parts of the initial parameter, float32 on the CPU; an embedding of half a GiB is never in memory as a whole.

    Norms are one (zero where one is added to them), biases zero, matrices normal with deviation 0.02, a
    scalar head normal with deviation 1 / sqrt(hidden + 1), which gives first values of about one
    (Stiennon et al. 2020, appendix B.1).
    """
    digest = hashlib.blake2b(f"{seed}/{spec.name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    std = (spec.shape[1] + 1) ** -0.5 if spec.name == "score.weight" else _INITIAL_STD
    # A multiple of 16, for which torch draws the same numbers in parts as in one.
    rows = max(1, _DRAWN_ELEMENTS // (16 * prod(spec.shape[1:]))) * 16
    for start in range(0, spec.shape[0], rows):
        shape = (min(rows, spec.shape[0] - start), *spec.shape[1:])
        box = Box(spec.name, (start, *(0 for _ in shape[1:])), shape)
        if spec.initial == "normal":
            yield box, torch.randn(shape, generator=generator).mul_(std)
        else:
            yield box, torch.full(shape, 1.0 if spec.initial == "one" else 0.0)
