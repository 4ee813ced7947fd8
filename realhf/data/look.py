"""Shows a file as a model will see it: `python -m realhf.data.look KIND --path FILE --tokenizer DIR`.

KIND is `prompts`, `examples` or `pairs`; the options are those of the data sets. After the line that describes the
data set come its first rows, with special tokens, and with [[ ]] around the tokens in the loss.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tyro

from realhf.base.errors import UserError
from realhf.data.datasets import PreferenceDataset, PromptDataset, SFTDataset
from realhf.data.text_dataset import OpenDataset, TextDataset
from realhf.data.tokenizer import Tokens

KINDS: dict[str, type[TextDataset]] = {"prompts": PromptDataset, "examples": SFTDataset, "pairs": PreferenceDataset}


@dataclass(frozen=True, kw_only=True)
class Shown:
    """rows: how many rows are shown."""

    rows: int = 2


def lines(dataset: TextDataset, rows: int) -> Iterator[str]:
    """The printed lines of a data set. Raises UserError for its first fault."""
    yield dataset.describe()
    opened, kept = dataset.open(), dataset.kept_rows()
    for row in range(min(rows, len(opened.file))) if kept is None else kept[:rows].tolist():
        yield ""
        yield opened.file.place(row)
        values = opened.row(row)
        for key in dataset.token_keys:
            yield f"  {key} ({len(values[key])} tokens): {_text(opened, values[key], _in_loss(values, key))}"


def _in_loss(values: dict[str, Tokens], key: str) -> list[int]:
    """[tokens]: 1 where a model learns the token; 0 in a prompt."""
    tokens = values[key]
    match key:
        case "tokens":
            first = values["prompt_length"][0]
            return values.get("loss_mask", [0] * first + [1] * (len(tokens) - first))
        case "chosen" | "rejected":
            return [int(place >= len(values["prompt"])) for place in range(len(tokens))]
    return [0] * len(tokens)


def _text(opened: OpenDataset, tokens: Tokens, in_loss: Sequence[int]) -> str:
    """The text of tokens on one line."""
    text, start = "", 0
    for end in range(1, len(tokens) + 1):
        if end == len(tokens) or in_loss[end] != in_loss[start]:
            piece = opened.tokenizer.decode(tokens[start:end], skip_special=False)
            text += f"[[{piece}]]" if in_loss[start] else piece
            start = end
    return text.replace("\n", "\\n")


def main(words: Sequence[str] | None = None) -> int:
    """0 where the data can be used, else 2."""
    kind, *options = list(sys.argv[1:] if words is None else words) or ["--help"]
    if kind not in KINDS:
        print(f"{__doc__}\nFor the options: python -m realhf.data.look prompts --help")
        return 0 if kind in ("-h", "--help") else 2
    shown, rest = tyro.cli(Shown, args=[w for w in options if w not in ("-h", "--help")], return_unknown_args=True)
    asks = [word for word in options if word in ("-h", "--help")]
    try:
        dataset = tyro.cli(KINDS[kind], args=rest + asks, prog=f"python -m realhf.data.look {kind}")
        for line in lines(dataset, shown.rows):
            print(line)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
