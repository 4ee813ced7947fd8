"""Generation as a model function call, and the function by which every algorithm generates."""

from torch import Tensor

from realhf.algorithms.rollout.config import Rollout
from realhf.algorithms.rollout.stop_strings import stop_strings
from realhf.api.generation import GenerationOptions
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult, Context, GenerationOutput, GenerationRequest, Model


def generate(
    model: Model, batch: Batch, context: Context, options: GenerationOptions, *, draw: int = 0
) -> GenerationOutput:
    """Samples a response to every `prompt`; the key `forced_response` replaces the samples (replay).

    `draw`, below 2**32, tells calls of a step apart that are to draw other random numbers.
    """
    request = GenerationRequest(
        options,
        sample_key=(context.seed ^ draw, context.step),
        micro_batches=context.micro_batches,
        planned_graphs=context.decode_graphs,
        forced=batch.data.get("forced_response"),
        return_logits="logits" in context.record,
        is_end=stop_strings(options.tokenizer, options.stop_strings) if options.stop_strings else None,
    )
    return model.generate(batch, request)


def responses(batch: Batch, sequences: list[Tensor]) -> list[Tensor]:
    """Per sample [response]: the tokens after the prompt in `sequences`."""
    return [seq[len(prompt) :] for prompt, seq in zip(batch.data["prompt"], sequences, strict=True)]


class RolloutInterface:
    """See `Rollout`."""

    def __init__(self, config: Rollout):
        self.config = config

    def generate(self, model: Model, batch: Batch, context: Context) -> CallResult:
        c = self.config
        out = generate(model, batch, context, c)
        if not context.holds_outputs:
            return CallResult()
        columns = {
            c.sequence_key: out.sequences,
            "logprob": out.logprobs,
            "untruncated_logprob": out.untruncated_logprobs,
            "margin": out.margins,
            "logits": out.logits,
        }
        outputs = {key: values for key, values in columns.items() if values}
        lengths = [len(r) for r in responses(batch, out.sequences)]
        return CallResult(outputs=outputs, stats={"response_length": (float(sum(lengths)), len(lengths))})
