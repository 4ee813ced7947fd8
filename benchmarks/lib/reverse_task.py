"""A second miniature task, with a tokenizer of many letters a token: `reverse lomina ->` is answered ` animol`.

`python -m benchmarks.lib.reverse_task DIR --seed 0` writes

    tokenizer/          tokenizer.json (byte-level BPE of 512 tokens) and tokenizer_config.json
    sft.jsonl           prompt, answer
    train.jsonl         prompt, word: for reinforcement learning
    evaluation.jsonl    prompt, word
    rewards.py          `share` of the letters that are right, `exact`

Words have 4 to 7 letters, so that prompts and answers differ in length; none is in two of the files.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from realhf.data.task_folder import ensure_folder, make_by_command, task_manifest

END = "<|end|>"
VOCABULARY_SIZE = 512
# Raise it when the same seed gives other files than before.
FORMAT_VERSION = 2
SIZES = {"sft.jsonl": 20_000, "train.jsonl": 20_000, "evaluation.jsonl": 512}
REWARDS = '''"""Rewards of the reversal task: functions of the response and the row's column `word`."""


def share(response: str, word: str) -> float:
    """The share of letters that are right where they stand."""
    right, given = word[::-1], response.strip()
    return sum(a == b for a, b in zip(right, given)) / max(len(right), len(given))


def exact(response: str, word: str) -> float:
    """1 for the reversed word, 0 for everything else."""
    return float(response.strip() == word[::-1])
'''


def prompt_of(word: str) -> str:
    return f"reverse {word} ->"


def ensure(data_dir: str | Path, seed: int = 0) -> Path:
    """Makes the files unless they are there already; returns the folder. Raises as `ensure_folder`."""
    manifest = task_manifest("reverse", FORMAT_VERSION, seed, SIZES)
    return ensure_folder(data_dir, manifest, lambda folder: _write(folder, seed))


def _write(folder: Path, seed: int) -> None:
    words = _distinct_words(random.Random(seed))
    texts = []
    for name, size in SIZES.items():
        rows = [{"prompt": prompt_of(word), "word": word} for word, _ in zip(words, range(size), strict=False)]
        if name == "sft.jsonl":
            rows = [{"prompt": row["prompt"], "answer": f" {row['word'][::-1]}"} for row in rows]
            texts = [row["prompt"] + row["answer"] for row in rows]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    _write_tokenizer(folder / "tokenizer", texts)
    (folder / "rewards.py").write_text(REWARDS)


def _distinct_words(rng: random.Random) -> Iterator[str]:
    """Words of two or three syllables, of which the last may end with a consonant."""
    seen: set[str] = set()
    while True:
        syllables = (rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))
        word = "".join(syllables) + rng.choice(["", *"nrst"])
        if word not in seen:
            seen.add(word)
            yield word


def _write_tokenizer(folder: Path, texts: list[str]) -> None:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}, indent=2) + "\n")


def _described(folder: Path) -> str:
    files = ", ".join(f"{name} ({size} lines)" for name, size in SIZES.items())
    return f"{folder}: {files}, tokenizer/, rewards.py"


if __name__ == "__main__":
    make_by_command("benchmarks.lib.reverse_task", "runs/reverse", ensure, _described)
