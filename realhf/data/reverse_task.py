"""A second miniature task, with a tokenizer of many letters a token: `reverse lomina ->` is answered ` animol`.

`python -m realhf.data.reverse_task DIR --seed 0` writes

    tokenizer/          tokenizer.json (byte-level BPE of 512 tokens) and tokenizer_config.json
    sft.jsonl           prompt, answer
    train.jsonl         prompt, word: for reinforcement learning
    evaluation.jsonl    prompt, word
    rewards.py          `share` of the letters that are right, `exact`

Words have 4 to 12 letters, so that prompts and answers differ in length; none is in two of the files.
"""

import argparse
import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from realhf.base.errors import UserError

END = "<|end|>"
VOCABULARY_SIZE = 512
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
    """Makes the files unless the folder is there already; returns the folder, which appears complete or not at all."""
    target = Path(data_dir)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write(work, seed)
        work.chmod(0o755)
        work.rename(target)
    except OSError as error:
        raise UserError(f"{target} cannot be made ({error.strerror}); name another folder") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


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
    """Words of two to six syllables."""
    seen: set[str] = set()
    while True:
        syllables = (rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 6)))
        word = "".join(syllables)
        if word not in seen:
            seen.add(word)
            yield word


def _write_tokenizer(folder: Path, texts: list[str]) -> None:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(END, special=True, normalized=False)],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m realhf.data.reverse_task",
        description="Makes the data of the reversal task; does nothing where the folder is there already.",
        epilog="example: python -m realhf.data.reverse_task runs/reverse --seed 0",
    )
    parser.add_argument("data_dir")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        target = ensure(arguments.data_dir, arguments.seed)
    except UserError as error:
        parser.exit(2, f"{error}\n")
    print(f"{target}: {', '.join(f'{name} ({size} lines)' for name, size in SIZES.items())}, tokenizer/, rewards.py")


if __name__ == "__main__":
    main()
