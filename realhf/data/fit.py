"""Checks before a run that every model can read the tokens and the lengths that will reach it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from realhf.api.experiment import DatasetExtent
from realhf.api.generation import GenerationOptions
from realhf.base.errors import UserError
from realhf.data.recorded import read_recorded
from realhf.dataflow.graph import DataflowGraph, ModelFunctionCallDef


@dataclass(frozen=True)
class _Length:
    """The longest sequence of a key: its tokens, and a sentence about where they come from."""

    tokens: int
    origin: str
    remedy: str


def check_fit(graph: DataflowGraph, extent: DatasetExtent) -> None:
    """Compares the tokens and the lengths of a data set, and of responses, with models' vocabularies and positions.

    A model reads rows of the data set, and sequences that other calls make from them. Therefore the whole tokenizer has
    to fit every model, and a response counts with the longest prompt.

    Raises:
        UserError: naming file, line and id, a token that is not in a model's vocabulary, or a sequence that is longer
            than its positions; or a column that a call reads by name and no row has.
    """
    lengths = {
        key: _Length(
            found.longest,
            f"{found.longest_at}: {key!r} has {found.longest} tokens",
            "shorten or delete that line, or set a limit (--max-prompt-tokens, --max-tokens) with --too-long drop",
        )
        for key, found in extent.keys.items()
    }
    for call in graph.calls.values():
        try:
            call.interface_impl.check_columns(extent.columns)
        except UserError as error:
            raise UserError(f"data set {extent.path}: {error}") from None
        call.interface_impl.check_nulls(extent.nulls)
        if not call.uses_model:
            continue
        _check_ids(call, extent)
        if call.generates:
            _check_options(call)
            response = _with_response(call, lengths)
            _check_length(call, response)
            lengths |= {key: response for key in call.output_data[:1] if response}
        else:
            for key in call.input_data:
                _check_length(call, lengths.get(key))


def check_replay(graph: DataflowGraph, folder: Path, steps: range, batch_size: int) -> None:
    """Compares recorded rollouts with the vocabulary of the models that read them.

    Raises:
        UserError: naming file, sample and id; or a step or sample is missing.
    """
    for call in graph.calls.values():
        if not call.generates or not call.output_data:
            continue
        key = call.output_data[0]
        readers = [call, *(graph.calls[name] for name in graph.consumers(key) if graph.calls[name].uses_model)]
        smallest = min(readers, key=lambda reader: reader.config.vocab_size)
        for step in steps:
            found = read_recorded(folder, step, call.name, key)
            if missing := sorted(set(range(batch_size)) - found.keys()):
                raise UserError(
                    f"--replay {folder}: step {step + 1} has no {key!r} of sample {missing[0]}, and a step of this run "
                    f"has {batch_size} samples; give rollouts that were recorded with this batch size"
                )
            for sample, recorded in found.items():
                for token in (recorded.value.min(initial=0), recorded.value.max(initial=0)):
                    what = f"{recorded.path}: {key!r} of sample {sample} has the token id {token}"
                    _check_id(smallest, int(token), what, "give rollouts of the same tokenizer")


def _check_ids(call: ModelFunctionCallDef, extent: DatasetExtent) -> None:
    for key in call.input_data:
        if found := extent.keys.get(key):
            what = f"{found.largest_at}: {key!r} has the token id {found.largest}"
            _check_id(call, found.largest, what, "use the tokenizer that the model was made with")
    what = f"tokenizer {extent.tokenizer}: its largest token id is {extent.largest_token}"
    _check_id(call, extent.largest_token, what, "use the one that the model was made with")


def _check_options(call: ModelFunctionCallDef) -> None:
    """Those that the configuration of an interface derives from, and those that a user's own has in fields."""
    config = call.interface_impl
    for options in (config, *(getattr(config, field.name) for field in fields(config))):
        if not isinstance(options, GenerationOptions):
            continue
        _check_id(call, max(options.end_token, 0), f"eos_token={options.end_token}", "give the model's, or -1 for none")
        for stop in options.stop_sequences:
            for token in stop:
                what = f"stop_sequences has the token id {token} in {stop}"
                _check_id(call, token, what, "give sequences of the model's tokens")


def _check_id(call: ModelFunctionCallDef, token: int, what: str, remedy: str) -> None:
    vocab_size = call.config.vocab_size
    if not 0 <= token < vocab_size:
        raise UserError(
            f"{what}, and model {call.model_name!r} of {call.name} has vocab_size={vocab_size}, ids from 0 to "
            f"{vocab_size - 1}; {remedy}, or a model with that id"
        )


def _with_response(call: ModelFunctionCallDef, lengths: Mapping[str, _Length]) -> _Length | None:
    prompt = lengths.get(call.input_data[0]) if call.input_data else None
    new_tokens = getattr(call.interface_impl, "max_new_tokens", None)
    if prompt is None or not isinstance(new_tokens, int):
        return None
    return _Length(
        prompt.tokens + new_tokens,
        f"{prompt.origin}, and with max_new_tokens={new_tokens} of {call.name} {prompt.tokens + new_tokens}",
        f"lower max_new_tokens, {prompt.remedy}",
    )


def _check_length(call: ModelFunctionCallDef, length: _Length | None) -> None:
    longest = call.config.longest_sequence
    if length is not None and longest is not None and length.tokens > longest:
        field = "max_positions" if call.config.positions == "learned" else "max_position_embeddings"
        raise UserError(
            f"{length.origin}, and model {call.model_name!r} of {call.name} has positions for {longest} ({field}); "
            f"{length.remedy}, or use a model of longer sequences"
        )
