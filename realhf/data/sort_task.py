"""The miniature task: sort four to seven letters, `dbeca>` -> `abcde`, from a fixed seed.

`python -m realhf.data.sort_task DIR --seed 0` writes

    tokenizer.json              32 tokens, one a character
    sft.jsonl                   prompt, answer; many of the answers deliberately wrong
    preferences.jsonl           prompt, chosen (right), rejected (wrong)
    preferences_held_out.jsonl  the same
    prompts.jsonl               prompt, for reinforcement learning
    evaluation.jsonl            prompt, answer (right)

No prompt is in two of the files, or twice in one.
"""

import json
import random
import string
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

from realhf.architecture.model import DecoderConfig
from realhf.data.task_folder import ensure_folder, make_by_command, task_manifest

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
VOCABULARY = (PAD, BOS, EOS, ">", *string.ascii_lowercase, "*", " ")
EOS_TOKEN = VOCABULARY.index(EOS)
MAX_PROMPT_TOKENS = 9  # the begin token, seven letters, ">"
MAX_NEW_TOKENS = 9  # a wrong answer of eight letters and the end token

# 1.8 million parameters; eight heads, so that tensor parallelism over 2, 4 and 8 divides them.
SORT_MODEL = DecoderConfig(
    hidden_size=192,
    intermediate_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=8,
    vocab_size=len(VOCABULARY),
)

SIZES = {
    "sft.jsonl": 20_000,
    "preferences.jsonl": 5_600,
    "preferences_held_out.jsonl": 400,
    "prompts.jsonl": 20_000,
    "evaluation.jsonl": 512,
}
# Raise it when the same seed gives other files than before.
FORMAT_VERSION = 2


def right_answer(prompt: str) -> str:
    """`dbeca>` -> `abcde`."""
    return "".join(sorted(prompt.removesuffix(">")))


def ensure(data_dir: str | Path, seed: int = 0) -> Path:
    """Makes the files unless they are there already; returns the folder.

    The folder appears complete or not at all, also when several processes make it at once.

    Raises:
        UserError: the folder holds something else, or data of another seed.
    """
    manifest = task_manifest("sort", FORMAT_VERSION, seed, SIZES)
    return ensure_folder(data_dir, manifest, lambda folder: _write(folder, seed))


def make_tokenizer() -> Tokenizer:
    """One token a character; `<bos>` is put before a text that is encoded with special tokens."""
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(VOCABULARY)}))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()  # letters without spaces between them
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, BOS, EOS)])
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=None, special_tokens=[(BOS, VOCABULARY.index(BOS))]
    )
    return tokenizer


def _write(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    prompts = _distinct_prompts(rng)
    makers: dict[str, Callable[[str], dict[str, str]]] = {
        "sft.jsonl": lambda prompt: {"prompt": prompt, "answer": _sft_answer(prompt, rng)},
        "preferences.jsonl": lambda prompt: _preference(prompt, rng),
        "preferences_held_out.jsonl": lambda prompt: _preference(prompt, rng),
        "prompts.jsonl": lambda prompt: {"prompt": prompt},
        "evaluation.jsonl": lambda prompt: {"prompt": prompt, "answer": right_answer(prompt)},
    }
    for name, size in SIZES.items():
        lines = [json.dumps(makers[name](next(prompts))) + "\n" for _ in range(size)]
        (folder / name).write_text("".join(lines))
    make_tokenizer().save(str(folder / "tokenizer.json"))


def _distinct_prompts(rng: random.Random) -> Iterator[str]:
    seen: set[str] = set()
    while True:
        letters = "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(4, 7)))
        # A word of one letter only is sorted in either direction and cannot be answered wrongly that way.
        if letters not in seen and len(set(letters)) > 1:
            seen.add(letters)
            yield letters + ">"


def _sft_answer(prompt: str, rng: random.Random) -> str:
    """Wrong with a probability that depends on the prompt, so that even greedy decoding learns errors."""
    is_wrong = rng.random() < (0.25 if prompt[0] <= "m" else 0.75)
    if not is_wrong:
        return right_answer(prompt)
    return _descending(prompt, rng) if rng.random() < 0.85 else corrupted(prompt, rng, CORRUPTIONS[1:])


def _preference(prompt: str, rng: random.Random) -> dict[str, str]:
    return {"prompt": prompt, "chosen": right_answer(prompt), "rejected": corrupted(prompt, rng, CORRUPTIONS)}


Corruption = Callable[[str, random.Random], str]


def corrupted(prompt: str, rng: random.Random, kinds: tuple[Corruption, ...]) -> str:
    """A wrong answer of one of the kinds, each equally likely."""
    while True:
        answer = rng.choice(kinds)(prompt, rng)
        if answer != right_answer(prompt):
            return answer


def _descending(prompt: str, rng: random.Random) -> str:
    return right_answer(prompt)[::-1]


def _copied(prompt: str, rng: random.Random) -> str:
    return prompt.removesuffix(">")


def _swapped(prompt: str, rng: random.Random) -> str:
    """Two letters of the right answer in each other's place."""
    letters = list(right_answer(prompt))
    i, j = rng.sample(range(len(letters)), 2)
    letters[i], letters[j] = letters[j], letters[i]
    return "".join(letters)


def _substituted(prompt: str, rng: random.Random) -> str:
    letters = list(right_answer(prompt))
    letters[rng.randrange(len(letters))] = rng.choice(string.ascii_lowercase)
    return "".join(letters)


def _dropped(prompt: str, rng: random.Random) -> str:
    answer = right_answer(prompt)
    i = rng.randrange(len(answer))
    return answer[:i] + answer[i + 1 :]


def _duplicated(prompt: str, rng: random.Random) -> str:
    answer = right_answer(prompt)
    i = rng.randrange(len(answer))
    return answer[:i] + answer[i] + answer[i:]


CORRUPTIONS: tuple[Corruption, ...] = (_descending, _copied, _swapped, _substituted, _dropped, _duplicated)


def _described(folder: Path) -> str:
    return "\n".join(f"{folder / name}: {size} lines" for name, size in SIZES.items())


if __name__ == "__main__":
    make_by_command("realhf.data.sort_task", "runs/data", ensure, _described)
