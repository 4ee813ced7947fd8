"""The loss of TRL's DistillationTrainer and its gradients in float64: `python FILE INPUTS OUTPUTS`, safetensors files.

In a process of its own: TRL computes in float32 whatever it is given, so that float32 is made to mean float64 here.
"""

import json
import sys

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

torch.float32 = torch.float64
torch.Tensor.float = torch.Tensor.double

import trl  # noqa: E402
from trl.trainer.distillation_trainer import _chunked_divergence_loss  # noqa: E402


def main(inputs: str, outputs: str) -> None:
    given = load_file(inputs)
    with safe_open(inputs, "pt") as file:
        cases = json.loads(file.metadata()["cases"])
    found = {}
    for number, (beta, temperature) in enumerate(cases):
        hidden, weight = (given[name].clone().requires_grad_() for name in ("student_hidden", "student_weight"))
        loss, *_ = _chunked_divergence_loss(
            *(hidden, given["teacher_hidden"], weight, given["teacher_weight"], given["mask"]),
            beta,
            temperature=temperature,
        )
        loss.backward()
        found |= {
            f"{number} loss": loss.detach()[None],
            f"{number} hidden": hidden.grad,
            f"{number} weight": weight.grad,
        }
    save_file(found, outputs, {"version": trl.__version__})


if __name__ == "__main__":
    main(*sys.argv[1:])
