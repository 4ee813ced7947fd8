"""The operators of a decoder, and the mode in which data parallelism keeps each of their slices (OSDP, IJCAI 2023).

- `embedding`, `positions`, `head`: of the vocabulary, of learned positions, of the language model or the critic. A tied
  head is the embedding.
- `layers.N.q`, `k`, `v`, `o`, `gate`, `up`, `down`: a projection. In a mixture of experts `layers.N.experts`, all of a
  layer's with their router.
- `norms`: all norms and biases together.

A projection is cut along its input dimension, and so computed as a sum; an embedding along its hidden dimension, a head
along the vocabulary.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache

from realhf.architecture.compute import Mode, ModeRules, modes_in
from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError
from realhf.geometry.parameters import ParameterSpec, decoder_parameters

NORMS, EMBEDDING, HEAD = "norms", "embedding", "head"
_DEFAULT: tuple[Mode, ...] = ("zero1",)
_OUTSIDE = {
    "model.embed_tokens.weight": EMBEDDING,
    "model.embed_positions.weight": "positions",
    "lm_head.weight": HEAD,
    "score.weight": HEAD,
}


def operator_of(spec: ParameterSpec) -> str:
    """The name of the operator that a parameter belongs to."""
    if spec.name in _OUTSIDE:
        return _OUTSIDE[spec.name]
    if len(spec.shape) == 1:
        return NORMS
    module = spec.name.removesuffix(".weight").rpartition(".")[2]
    # The operator of a mixture of experts; its router is `mlp.gate`.
    kind = "experts" if ".experts." in spec.name or module == "gate" else module.removesuffix("_proj")
    return f"layers.{spec.layer}.{kind}"


def kind_of(operator: str) -> str:
    """The kind of an operator, the same in all layers: `q`, `embedding`, and so on."""
    return operator.rpartition(".")[2]


@lru_cache(maxsize=64)
def operators(model: DecoderConfig) -> Mapping[str, tuple[ParameterSpec, ...]]:
    """The parameters of every operator, in the order of the forward pass."""
    found: dict[str, tuple[ParameterSpec, ...]] = {}
    for spec in decoder_parameters(model):
        name = operator_of(spec)
        found[name] = (*found.get(name, ()), spec)
    return found


def is_projection(operator: str) -> bool:
    """Whether it is one matrix of a layer, computed as a product of its own."""
    return operator.startswith("layers.") and kind_of(operator) != "experts"


def can_be_cut(operator: str, model: DecoderConfig) -> bool:
    """Whether it can have more than one slice."""
    if model.head == "lm" and not model.tied_embeddings and operator in (EMBEDDING, HEAD):
        return True
    return is_projection(operator) or (operator == EMBEDDING and model.head == "scalar")


def cut_dim(operator: str) -> int:
    """The dimension of its weight along which it is cut."""
    return 0 if operator == HEAD else 1


@lru_cache(maxsize=64)
def slice_modes(model: DecoderConfig, rules: ModeRules) -> Mapping[str, tuple[Mode, ...]]:
    """The modes of every operator's slices.

    Raises:
        UserError: a rule names no operator, or a mode that an operator does not have.
    """
    known = operators(model)
    modes = dict.fromkeys(known, _DEFAULT)
    for pattern, text in rules:
        named = _named(model, pattern)
        if not named:
            raise UserError(
                f"data_parallel: {pattern!r} names no operator of this model; its operators are {_list(known)}; write "
                "one of them, 'layers.0-3.q' for some layers, 'layers.*.q' for all, or '*'"
            )
        wanted = modes_in(text)
        for name in named:
            if name == NORMS and "*" in pattern:
                modes[name] = _DEFAULT if "sharded" in wanted or len(wanted) > 1 else wanted
                continue
            _check_modes(name, wanted, model)
            modes[name] = wanted
    return modes


@lru_cache(maxsize=4096)  # a search asks for many rules with the same patterns
def _named(model: DecoderConfig, pattern: str) -> tuple[str, ...]:
    return tuple(name for name in operators(model) if names_operator(pattern, name))


def _check_modes(name: str, wanted: tuple[Mode, ...], model: DecoderConfig) -> None:
    if name == NORMS and "sharded" in wanted:
        raise UserError(f"data_parallel: {name!r} cannot be sharded: norms are used everywhere; write zero1")
    if len(wanted) > 1 and not can_be_cut(name, model):
        raise UserError(
            f"data_parallel: {name!r} cannot have {len(wanted)} slices: projections of layers can, and an embedding "
            "and a language model's head that are not one; write one mode"
        )


def names_operator(pattern: str, name: str) -> bool:
    """Whether a rule's pattern names an operator: part by part, `*` and `0-3` for numbers; `*` alone names all."""
    if pattern == "*":
        return True
    patterns, parts = pattern.split("."), name.split(".")
    return len(patterns) == len(parts) and all(map(_matches, patterns, parts))


def _matches(pattern: str, part: str) -> bool:
    first, _, last = pattern.partition("-")
    if first.isdecimal() and last.isdecimal() and part.isdecimal():
        return int(first) <= int(part) <= int(last)
    return fnmatchcase(part, pattern)


def _list(names: Mapping[str, object]) -> str:
    """Operators by name, those of the layers once."""
    outside = [name for name in names if not name.startswith("layers.")]
    kinds = dict.fromkeys(kind_of(name) for name in names if name.startswith("layers."))
    return ", ".join([*outside, *(f"layers.N.{kind}" for kind in kinds)])
