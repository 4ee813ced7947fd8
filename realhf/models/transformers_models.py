"""Models of `transformers`: built without values, filled with random ones, read from and written to its directories.

`python -m realhf.models.transformers_models` describes the model of a config.json; see
`realhf.architecture.transformers_config`. Code of a checkpoint's own is never executed.
"""

import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from realhf.architecture.model import DType
from realhf.architecture.transformers_config import Description, TransformersConfig
from realhf.base.errors import UserError
from realhf.geometry.boxes import Box
from realhf.geometry.parameters import decoder_parameters
from realhf.models.checkpoint import ReadBox, fill
from realhf.models.checkpoint_index import staged

SCORE = "score.weight"  # a scalar head's, [1, hidden]


class CausalModel(nn.Module):
    """A model of `transformers` under the head that `config` names.

    Its parameters are on the meta device until they are set; its buffers have their values.
    """

    def __init__(self, config: TransformersConfig, dtype: torch.dtype):
        super().__init__()
        with no_init_weights():
            self.causal = _built(config.config, dtype)
        self.causal.tie_weights()
        for places in self.places().values():
            self.set_parameter(places, nn.Parameter(self.get_parameter(places[0]).to("meta"), requires_grad=False))
        self.causal.eval()  # no dropout, as in every model of this project
        self.is_scalar = config.head == "scalar"
        if self.is_scalar:
            self.causal.set_output_embeddings(nn.Identity())
            self.score = nn.Linear(config.hidden_size, 1, bias=False, dtype=dtype, device="meta")

    def places(self) -> dict[str, list[str]]:
        """Every parameter of `decoder_parameters(config)`, with all places that it has: a tied embedding has two."""
        found: dict[int, list[str]] = {}
        for place, parameter in self.named_parameters(remove_duplicate=False):
            found.setdefault(id(parameter), []).append(place)
        return {places[0].removeprefix("causal."): places for places in found.values()}

    def set_parameter(self, places: Sequence[str], parameter: nn.Parameter) -> None:
        """Puts `parameter` in all the places."""
        for place in places:
            owner, _, leaf = place.rpartition(".")
            setattr(self.get_submodule(owner), leaf, parameter)

    def forward(self, tokens: Tensor, places: Tensor | None = None, **arguments: Any) -> Tensor:
        """Logits [sequences, length, vocab] or values [sequences, length] of tokens [sequences, length] int64. With
        `places` [sequences, length] bool, only those of the places that are true: [places, ...].

        `arguments` go to the model of `transformers`.
        """
        if self.is_scalar:
            hidden = self.causal.base_model(input_ids=tokens, use_cache=False).last_hidden_state
            output: Tensor = self.score(hidden)[..., 0]
        else:
            output = self.causal(input_ids=tokens, **({"use_cache": False} | arguments)).logits
        return output if places is None else output[places]

    def takes(self, argument: str) -> bool:
        """Whether the model of `transformers` has an argument of that name."""
        return argument in inspect.signature(self.causal.forward).parameters


def random_weights(config: TransformersConfig, seed: int) -> dict[str, Tensor]:
    """The weights with which `transformers` begins, float32 on the CPU, by name; they depend on the seed alone.

    A scalar head is drawn as those of this project are (Stiennon et al. 2020, appendix B.1).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        causal = _built(config.config, torch.float32)
        score = torch.randn(1, config.hidden_size) * (config.hidden_size + 1) ** -0.5
    return {name: tensor.detach() for name, tensor in causal.named_parameters()} | {SCORE: score}


class TransformersReader:
    """Reads any box of a model from a Hugging Face directory, by way of `transformers`, on the CPU.

    Raises:
        UserError: the directory is of another architecture, or lacks a tensor.
    """

    def __init__(self, directory: Path | str, config: TransformersConfig, new_head: bool = False):
        self.directory = Path(directory)
        try:
            found: Any = AutoModelForCausalLM.from_pretrained(
                self.directory,
                config=_config(config.config),
                dtype="auto",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"checkpoint {directory} cannot be read by transformers: {error}") from None
        causal, report = found
        is_wanted = {spec.name for spec in decoder_parameters(config)}
        lacking = [name for name in sorted(report["missing_keys"]) if name in is_wanted]
        if lacking and not new_head:
            raise UserError(f"checkpoint {directory} lacks the tensor {lacking[0]}; choose a complete checkpoint")
        self._found = {name: tensor.detach() for name, tensor in causal.named_parameters()}

    def read_into(self, tensor: Tensor, box: Box) -> None:
        """Fills `tensor`, of the shape of `box`, converting to its dtype. Raises UserError as `fill`."""
        if box.name not in self._found:
            raise UserError(
                f"checkpoint {self.directory} has no {box.name}; a scalar head begins anew (new_head=True), or comes "
                "from a checkpoint of a run"
            )
        whole = self._found[box.name]
        found = whole[box.slices_in(Box(box.name, (0,) * whole.dim(), tuple(whole.shape)))]
        fill(tensor, found, f"{self.directory}: {box.name}", box.offset)


def write_directory(
    directory: Path | str, config: TransformersConfig, dtype: DType, read_into: ReadBox, companions: Sequence[Path]
) -> list[Path]:
    """Writes a directory that `from_pretrained` reads, as `transformers` itself does; returns its files.

    Args:
        read_into: fills a tensor with a box of the model, as `CheckpointReader.read_into` does.
        companions: files (the tokenizer's) to copy along.

    Raises:
        UserError: the model has a scalar head, for which `transformers` has no class of this family.
    """
    if config.head == "scalar":
        raise UserError(
            f"{directory}: a scalar head on a model of transformers has no directory that from_pretrained reads; keep "
            "the checkpoint of boxes"
        )
    directory = Path(directory)
    causal = _built(config.config, getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in causal.named_parameters():
            read_into(parameter, Box(name, (0,) * parameter.dim(), tuple(parameter.shape)))
    with staged(directory, companions) as staging:
        causal.save_pretrained(staging)
    return sorted(directory.iterdir())


def _config(text: str) -> transformers.PreTrainedConfig:
    content = json.loads(text)
    family = content.get("model_type")
    if family not in CONFIG_MAPPING:
        raise UserError(f"transformers {transformers.__version__} has no model_type={family!r}")
    return CONFIG_MAPPING[family].from_dict(content)


def _built(text: str, dtype: torch.dtype) -> PreTrainedModel:
    causal: PreTrainedModel = AutoModelForCausalLM.from_config(_config(text), dtype=dtype, trust_remote_code=False)
    return causal


def describe(text: str) -> Description:
    """The model that the config.json `text` describes, found without memory for its parameters."""
    try:
        config = _config(text).get_text_config()
        with torch.device("meta"):
            causal = _built(text, torch.float32)
    except Exception as error:  # transformers raises many classes
        return Description(error=f"{error}")
    heads = config.num_attention_heads
    hidden = config.hidden_size
    head = causal.get_output_embeddings()
    of_head = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    prefix = causal.base_model_prefix + "."
    experts = _either(config, "num_local_experts", "num_experts", "n_routed_experts") or 0
    return Description(
        dimensions={
            "hidden_size": hidden,
            "intermediate_size": _either(config, "intermediate_size", "ffn_dim", "n_inner") or 4 * hidden,
            "num_layers": config.num_hidden_layers,
            "num_heads": heads,
            "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
            "vocab_size": config.vocab_size,
            "attention_head_dim": getattr(config, "head_dim", None),
            "max_position_embeddings": getattr(config, "max_position_embeddings", None),
        },
        experts=(experts, _either(config, "num_experts_per_tok", "moe_top_k") or 1) if experts else (0, 0),
        parameters=tuple((name, tuple(parameter.shape)) for name, parameter in causal.named_parameters()),
        head_parameters=tuple(
            name for name, p in causal.named_parameters() if id(p) in of_head and not name.startswith(prefix)
        ),
    )


def _either(config: Any, *names: str) -> Any:
    """The first of the attributes that has a value."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def main() -> None:
    """Reads a config.json from stdin; the last line of stdout is its description."""
    found = describe(sys.stdin.read())
    print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    main()
