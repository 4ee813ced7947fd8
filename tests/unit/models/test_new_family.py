"""The recipe of docs/contributing.md: a family is one file and one line of a table."""

import ast
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from realhf.architecture.families import FAMILIES
from realhf.architecture.hugging_face import config_content
from realhf.models.hugging_face_weights import HuggingFaceReader, write_hugging_face
from tests.unit.models.families import Oracle, oracle
from tests.unit.models.phi3 import PHI3
from tests.unit.models.test_families import check_training

ROOT = Path(__file__).parents[3]


@pytest.fixture
def phi3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Oracle:
    """A random model of a family that the package does not have, after one line was added to the table."""
    assert PHI3.model_type not in FAMILIES
    monkeypatch.setitem(FAMILIES, PHI3.model_type, PHI3)
    config = transformers.Phi3Config(
        hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=36, max_position_embeddings=64, sliding_window=7, pad_token_id=None, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return oracle(config, tmp_path / "theirs", torch.float64)


def test_a_family_is_a_file_and_a_line(phi3: Oracle) -> None:
    """Logits, gradients and a step of AdamW are those of transformers in float64."""
    check_training(phi3)


def test_its_checkpoints_are_written_and_read(phi3: Oracle, tmp_path: Path) -> None:
    reader = HuggingFaceReader(phi3.directory, phi3.config)
    like = config_content(phi3.directory / "config.json")
    write_hugging_face(tmp_path / "ours", phi3.config, "float64", reader.read_into, like=like)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float64).state_dict()
    theirs = phi3.hf.state_dict()
    assert again.keys() == theirs.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in theirs.items())


def test_no_other_file_knows_the_families() -> None:
    for path in (ROOT / "realhf").rglob("*.py"):
        # GGUF files have names of their own for architectures and tokenizers, equal to some of ours.
        if any(path.is_relative_to(ROOT / "realhf" / room) for room in ("architecture/families", "gguf")):
            continue
        texts = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not texts & FAMILIES.keys(), f"{path} names a family; say it in the family's file"


def test_the_recipe_names_its_files() -> None:
    recipe = (ROOT / "docs/contributing.md").read_text().partition("## A model family")[2].partition("\n## ")[0]
    for file in ("realhf/architecture/families/__init__.py", "tests/unit/models/families.py"):
        assert f"](../{file})" in recipe
