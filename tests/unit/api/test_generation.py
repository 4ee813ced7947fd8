"""What cannot be generated is refused where the options are written."""

import math

import pytest

from realhf.api.generation import GenerationOptions
from realhf.base.errors import UserError


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens 0 is not from 1 to "),
        (
            {"temperature": -0.5},
            r"temperature -0.5 is not from 1e-06 to 1,000,000 or 0 \(the most likely token\)",
        ),
        ({"eos_token": -2}, "eos_token -2 is not from -1 to "),
        ({"top_k": -1}, "top_k -1 is not from 0 to "),
        ({"top_p": 0.0}, "top_p 0.0 is not from 1e-09 to 1;"),
        ({"top_p": 1.1}, "top_p 1.1 is not from 1e-09 to 1;"),
        ({"min_new_tokens": 5}, "min_new_tokens=5 must be from 0 to max_new_tokens=4"),
        (
            {"mean_new_tokens": 4.5},
            "mean_new_tokens=4.5 must be from 1 to max_new_tokens=4, or 0 where",
        ),
        ({"mean_new_tokens": 0.5}, "mean_new_tokens=0.5 must be from 1 to"),
        ({"mean_new_tokens": -1.0}, "mean_new_tokens -1.0 is not from 0 to "),
        ({"stop_sequences": ((3,), ())}, "an empty sequence stops nothing"),
        ({"stop_strings": ("a", "")}, "an empty string is in every text; leave it out"),
        ({"stop_strings": ("a",)}, "tokenizer='': no such file, .* give the path of the model's tokenizer.json"),
        ({"kv_cache_tokens": 0}, "kv_cache_tokens 0 is not from 1 to "),
        ({"samples_per_prompt": 0}, "samples_per_prompt 0 is not from 1 to "),
        ({"temperature": math.nan}, "nan is not from 1e-06 to"),
        ({"temperature": math.inf}, "inf is not from 1e-06 to"),
        ({"temperature": 1e-320}, "is not from 1e-06 to"),
        ({"top_p": math.nan}, "top_p nan is not from"),
    ],
)
def test_a_wrong_option_is_named(wrong, message):
    with pytest.raises(UserError, match=message):
        GenerationOptions(**{"max_new_tokens": 4, "eos_token": 2, **wrong})
