"""The tokenizer of a run, kept in its directory for users of its checkpoints and for runs that start from it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from realhf.base.files import delete, sync_directory, write_atomically, writing_a_run
from realhf.data.merged import MergedDataset
from realhf.data.tokenizer import TOKENIZER_FILE, TextTokenizer
from realhf.models.hugging_face_files import CONFIG_FILE, companions_of, is_hugging_face
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run

TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"


@writing_a_run()
def keep_tokenizer(run: Run, directory: RunDirectory) -> None:
    """Makes RUN_DIR/tokenizer: the files of the data set's tokenizer, and of the trained model its config.json and
    generation_config.json. transformers reads it as a tokenizer, also where tokenizer.json was all that there was.

    There is none if the data set has no tokenizer; one of an earlier start stays. Raises RunError if a file cannot be
    written, UserError if the tokenizer cannot be read.
    """
    dataset = run.experiment.dataset
    dataset = dataset.parts[0] if isinstance(dataset, MergedDataset) else dataset  # all parts have one tokenizer
    location = getattr(dataset, "tokenizer", None)
    if not location or directory.tokenizer.exists():
        return
    source = Path(location)
    folder = source if source.is_dir() else source.parent
    part = directory.path / ".tokenizer.part"  # `prepare` removes what a crash leaves
    delete(part)
    part.mkdir()
    for path in companions_of(folder):
        shutil.copyfile(path, part / path.name)
    if source.is_file():
        shutil.copyfile(source, part / TOKENIZER_FILE)
    for name in (GENERATION_CONFIG, CONFIG_FILE):
        found = next((model / name for model in [*_model_folders(run), folder] if (model / name).is_file()), None)
        if found is not None:
            shutil.copyfile(found, part / name)
    if template := getattr(dataset, "chat_template", ""):  # the option's, which takes the place of the tokenizer's
        text = TextTokenizer(part, template).template.source
        write_atomically(part / CHAT_TEMPLATE, text.encode())
    _complete(part, getattr(dataset, "end_token", ""))
    sync_directory(part)
    part.rename(directory.tokenizer)
    sync_directory(directory.path)


def _model_folders(run: Run) -> Iterator[Path]:
    """Where the files of the trained language models lie, or of the run that they come from."""
    for name in run.changing_models:
        checkpoint = run.experiment.setups[name].checkpoint
        if checkpoint is None or not run.optimizer_steps(name) or run.experiment.graph.models[name].head != "lm":
            continue
        path = Path(checkpoint).absolute()
        yield path if is_hugging_face(path) or len(path.parents) < 3 else RunDirectory(path.parents[2]).tokenizer


def _complete(folder: Path, end_token: str) -> None:
    """Adds the two files without which transformers would guess the kind of the tokenizer and the end of a text.
    `end_token`: the one that the data set names, if any."""
    tokenizer = TextTokenizer(folder)
    named = tokenizer.token(end_token) if end_token else None
    ends = list(tokenizer.end_tokens if named is None else dict.fromkeys([named, *tokenizer.end_tokens]))
    if not (folder / TOKENIZER_CONFIG).is_file():
        config: dict[str, Any] = {
            **({"eos_token": tokenizer.decode(ends[:1], skip_special=False)} if ends else {}),
            **tokenizer.special_tokens,
            "clean_up_tokenization_spaces": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        write_atomically(folder / TOKENIZER_CONFIG, json.dumps(config, indent=2).encode() + b"\n")
    if not (folder / GENERATION_CONFIG).is_file():
        tokens = {"bos_token_id": tokenizer.begin, "eos_token_id": ends or None, "pad_token_id": tokenizer.pad}
        generation = {name: token for name, token in tokens.items() if token is not None}
        write_atomically(folder / GENERATION_CONFIG, json.dumps(generation, indent=2).encode() + b"\n")
