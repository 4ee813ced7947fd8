"""The families of models, a file for each or for kin; a new one is a file and a line here (`docs/contributing.md`)."""

from realhf.architecture.families.family import Family
from realhf.architecture.families.gemma import GEMMA
from realhf.architecture.families.gpt2 import GPT2
from realhf.architecture.families.llama import LLAMA
from realhf.architecture.families.mistral import MISTRAL, MIXTRAL
from realhf.architecture.families.qwen import QWEN2, QWEN3, QWEN3_MOE

# A decoder without a config.json of its own is written as the first family that can express it.
FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, MIXTRAL, QWEN3_MOE, GPT2)
}
