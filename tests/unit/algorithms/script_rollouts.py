"""Four rollouts and two pairs, as the calls of scripts get them."""

from typing import Any

import torch
from torch import Tensor

from realhf.api import loss_function
from realhf.api.script.config import Term, Update
from realhf.api.script.views import View
from realhf.engine.batch import Batch

ROLLOUT = View((("prompt", "prompt"), ("seq", "seq")))
PROMPTS = [[1, 4], [1, 5, 6], [1, 3], [1]]
ANSWERS = [[2, 3, 4], [5], [6, 7], [2, 2, 5, 3]]


def rollouts(**columns: list[Tensor]) -> Batch:
    """Four samples with responses of 3, 1, 2 and 4 tokens."""
    prompts = [torch.tensor(prompt) for prompt in PROMPTS]
    sequences = [torch.tensor(prompt + answer) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    return Batch((4, 5, 6, 7), {"prompt": prompts, "seq": sequences, **columns})


def logprobs_of(model: Any, sequences: list[Tensor], prompts: list[Tensor], temperature: float = 1.0) -> list[Tensor]:
    """Per sample [response], computed one sequence at a time."""
    out = []
    for sequence, prompt in zip(sequences, prompts, strict=True):
        logits = model.module(sequence[None])[0] / temperature
        every = logits.log_softmax(-1)[:-1].gather(1, sequence[1:, None])[:, 0]
        out.append(every[len(prompt) - 1 :])
    return out


def pairs() -> tuple[Batch, View]:
    data = {
        "prompt": [torch.tensor([1]), torch.tensor([1, 2])],
        "chosen": [torch.tensor([1, 3, 4]), torch.tensor([1, 2, 5])],
        "rejected": [torch.tensor([1, 6]), torch.tensor([1, 2, 7, 7])],
        "margin": [torch.tensor([0.5]), torch.tensor([1.0])],
    }
    return Batch((8, 9), data), View(tuple((key, key) for key in data))


def negative(logprob: Tensor, batch: Batch) -> Tensor:
    return -logprob


def term(loss: Any = None, batch: View = ROLLOUT, **settings: Any) -> Term:
    return Term(loss or loss_function(negative)(), batch=batch, **settings)


def update_of(first: Term, *others: Term, **settings: Any) -> Update:
    return Update(**vars(first), also=others, prefix="actor", **settings)
