"""What cannot be generated is refused where the options are written."""

import pytest

from realhf.api.errors import UserError
from realhf.api.generation import GenerationOptions


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"temperature": -0.5}, "temperature=-0.5 must be 0"),
        ({"eos_token": -2}, "eos_token=-2 must be the number of a token"),
        ({"top_k": -1}, "top_k=-1 must be a number of tokens"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_p": 1.1}, "top_p=1.1 must be above 0 and at most 1"),
        ({"min_new_tokens": 5}, "min_new_tokens=5 must be from 0 to max_new_tokens=4"),
        ({"stop_sequences": ((3,), ())}, "an empty sequence stops nothing"),
        ({"stop_strings": ("a", "")}, "an empty string is in every text; leave it out"),
        ({"stop_strings": ("a",)}, "tokenizer='': no such file, .* give the path of the model's tokenizer.json"),
        ({"kv_cache_tokens": 0}, "kv_cache_tokens=0 must be at least 1"),
    ],
)
def test_a_wrong_option_is_named(wrong, message):
    with pytest.raises(UserError, match=message):
        GenerationOptions(**{"max_new_tokens": 4, "eos_token": 2, **wrong})
