"""The tokenizer that the fields of a GGUF file describe, as the files of a Hugging Face directory.

Two kinds: byte-level BPE ("gpt2") with the pattern that `tokenizer.ggml.pre` names, and the BPE of SentencePiece
("llama").
"""

import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from realhf.architecture.families.fields import shown
from realhf.base.errors import UserError
from realhf.gguf.file import GGUFFile

Merges = list[tuple[str, str]]

_CONTROL, _USER_DEFINED = 3, 4  # values of `tokenizer.ggml.token_type`
# The longest tokens of published vocabularies have some hundred spaces.
_LONGEST_TOKEN = 2**12
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2 = _WORDS + r"\p{N}{1,3}" + _REST, _WORDS + r"\p{N}" + _REST
# By `tokenizer.ggml.pre`: the pattern of the parts that are merged alone; None: GPT-2's, which the library has.
_PATTERNS = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
}
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_REMEDY = "give the model's original Hugging Face directory"


def tokenizer_files(file: GGUFFile, num_rows: int) -> dict[str, bytes]:
    """By name, the content of tokenizer.json, tokenizer_config.json (with the chat template) and
    generation_config.json (with the end tokens). Empty: the file has no tokenizer.

    num_rows: those of the embedding.

    Raises:
        UserError: the tokenizer is of another kind, or its fields do not fit together.
    """
    return _Source(file, num_rows).files() if "tokenizer.ggml.model" in file.fields else {}


class _Source:
    """The fields `tokenizer.ggml.*` of a file."""

    def __init__(self, file: GGUFFile, num_rows: int):
        self._file, self._num_rows = file, num_rows
        self._kind = self._field("model")
        if self._kind not in ("gpt2", "llama"):
            raise self._error("model", "it is not supported, only gpt2, llama")
        self._is_bytes = self._kind == "gpt2"
        self._tokens: list[str] = self._list("tokens", str)
        if not 0 < len(self._tokens) <= num_rows or max(map(len, self._tokens)) > _LONGEST_TOKEN:
            raise self._error("tokens", f"it must have 1 to {num_rows:,} texts of up to {_LONGEST_TOKEN:,} characters")
        self._types: list[int] = self._list("token_type", int, len(self._tokens))

    def files(self) -> dict[str, bytes]:
        special = {name: self._tokens[token] for name, key in _SPECIAL.items() if (token := self._id(key)) is not None}
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            "add_bos_token": self._adds("bos"),
            "add_eos_token": self._adds("eos"),
            "clean_up_tokenization_spaces": False,
        }
        template = self._file.fields.get("tokenizer.chat_template", "")
        if not isinstance(template, str):
            raise UserError(f"{self._file.path}: tokenizer.chat_template={shown(template)} is no text; {_REMEDY}")
        config |= {"chat_template": template} if template else {}
        ends = dict.fromkeys(token for key in ("eos", "eot", "eom") if (token := self._id(key)) is not None)
        tokens = {
            "bos_token_id": self._id("bos"),
            "eos_token_id": list(ends) or None,
            "pad_token_id": self._id("padding"),
        }
        generation = {name: token for name, token in tokens.items() if token is not None}
        return {
            "tokenizer.json": self._tokenizer(special).encode(),
            "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n",
            "generation_config.json": json.dumps(generation, indent=2).encode() + b"\n",
        }

    def _tokenizer(self, special: dict[str, str]) -> str:
        try:
            tokenizer = self._of_bytes() if self._is_bytes else self._of_sentencepiece(special)
            added = [(token, kind) for token, kind in zip(self._tokens, self._types, strict=False)]
            added = [(token, kind == _CONTROL) for token, kind in added if kind in (_CONTROL, _USER_DEFINED)]
            for token, is_special in added + [(token, True) for token in special.values()]:
                one = AddedToken(token, normalized=False, special=is_special)
                (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)([one])
            before = [special["bos_token"]] if self._adds("bos") else []
            behind = [special["eos_token"]] if self._adds("eos") else []
            if before or behind:
                tokenizer.post_processor = processors.TemplateProcessing(
                    single=[*(f"{token}:0" for token in before), "$A:0", *(f"{token}:0" for token in behind)],
                    special_tokens=[(token, self._tokens.index(token)) for token in before + behind],
                )
            text: str = tokenizer.to_str()
        except UserError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"{self._file.path}: tokenizer.ggml: {error}; {_REMEDY}") from None
        return text

    def _of_bytes(self) -> Any:
        pre = self._field("pre", "default")
        if pre not in _PATTERNS:
            raise self._error("pre", f"it is not supported, only {', '.join(_PATTERNS)}")
        merges = [tuple(merge.split(" ", 1)) for merge in self._list("merges", str)]
        if one := next((merge for merge in merges if len(merge) != 2), None):
            raise self._error("merges", "it must be two tokens with a space between them", one[0])
        vocabulary = {token: index for index, token in enumerate(self._tokens)}
        # As in llama.cpp and in the original: of these, a part that is a token is not merged.
        whole = pre == "llama-bpe"
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole))
        pattern = _PATTERNS[pre]
        if pre == "qwen2":  # as the original's tokenizer.json; the file does not say it
            tokenizer.normalizer = normalizers.NFC()
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        steps += [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _of_sentencepiece(self, special: dict[str, str]) -> Any:
        vocabulary = {token: index for index, token in enumerate(self._tokens)}
        tokenizer = Tokenizer(
            models.BPE(
                vocab=vocabulary,
                merges=self._scored_merges(vocabulary),
                unk_token=special.get("unk_token"),
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        has_prefix = self._field("add_space_prefix", True)
        scheme = "first" if has_prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(content=" ", left=1)] * bool(has_prefix))
        return tokenizer

    def _scored_merges(self, vocabulary: dict[str, int]) -> Merges:
        """The pairs of tokens that are a token together, the highest score of it first."""
        scores = self._list("scores", float, len(self._tokens))
        found: list[tuple[tuple[float, int, int], str, str]] = []
        for token, score in zip(self._tokens, scores, strict=True):
            pairs = [(token[:end], token[end:]) for end in range(1, len(token))]
            pairs = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
            pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
            found += [((score, len(left), len(right)), left, right) for left, right in pairs]
        found.sort(key=lambda one: one[0], reverse=True)
        return [(left, right) for _, left, right in found]

    # --- Fields.

    def _adds(self, name: str) -> bool:
        """Whether a begin or an end token is put around a text, as llama.cpp has it where the file does not say."""
        by_default = name == "bos" and (not self._is_bytes or self._field("pre", "default") == "llama-bpe")
        return bool(self._field(f"add_{name}_token", by_default)) and self._id(name) is not None

    def _id(self, name: str) -> int | None:
        """A token of a meaning. SentencePiece's have numbers where the file does not say."""
        by_default = None if self._is_bytes else {"unknown": 0, "bos": 1, "eos": 2}.get(name)
        token = self._field(f"{name}_token_id", by_default)
        if token is None or (isinstance(token, int) and 0 <= token < len(self._tokens)):
            return token
        raise self._error(f"{name}_token_id", f"it must be a token's number, below {len(self._tokens):,}")

    def _list(self, name: str, kind: type[Any], length: int | None = None) -> list[Any]:
        values = self._field(name)
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise self._error(name, f"it must be a list of {kind.__name__}")
        if length is not None and len(values) != length:
            raise self._error(name, f"it must have one value for each of the {length:,} tokens")
        return values

    def _field(self, name: str, default: Any = None) -> Any:
        return self._file.fields.get(f"tokenizer.ggml.{name}", default)

    def _error(self, name: str, rule: str, part: Any = None) -> UserError:
        """`part`: the value, where it is one of many."""
        value = self._field(name) if part is None else part
        return UserError(f"{self._file.path}: tokenizer.ggml.{name}={shown(value)}: {rule}; {_REMEDY}")
