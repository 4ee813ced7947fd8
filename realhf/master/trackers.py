"""A run's metrics for TensorBoard and Weights & Biases, beside metrics.jsonl."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from realhf.base.errors import UserError
from realhf.rewards.details import Scalar
from realhf.rundir.run import RunSpec
from realhf.rundir.samples import Sample

GIB = 2**30


class Tracker(Protocol):
    """Takes the numbers of one step by name, and completions. Steps count from 1; 0 is before training."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def write_samples(self, name: str, step: int, samples: Sequence[Sample]) -> None: ...

    def close(self) -> None:
        """Returns when everything has been stored."""


class TensorBoard:
    """Writes event files to `folder` by tensorboardX, which needs no TensorFlow, but imports torch.

    A run that resumes after `resume_step` steps writes another file; viewers drop later steps of earlier files.
    """

    def __init__(self, folder: Path, resume_step: int):
        from tensorboardX import SummaryWriter  # an optional extra

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def write_samples(self, name: str, step: int, samples: Sequence[Sample]) -> None:
        """Writes the samples as one text, since TensorBoard shows one text a step."""
        self._writer.add_text(name, "\n\n".join(map(_markdown, samples)), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _markdown(sample: Sample) -> str:
    """The texts as blocks that Markdown leaves as they are."""
    texts = {"prompt": sample.prompt, "response": sample.response, **_detailed(sample)}
    blocks = ("".join(f"    {line}\n" for line in str(text).split("\n")) for text in texts.values())
    reward = "none" if sample.reward is None else f"{sample.reward:.4g}"
    parts = (f"{name}\n\n{block}" for name, block in zip(texts, blocks, strict=True))
    return "\n".join([f"**sample {sample.sample}, reward {reward}**\n", *parts])


def _detailed(sample: Sample) -> dict[str, Scalar]:
    """How it came to its reward, by name; values of functions as `reward_NAME`, like their statistics."""
    of = sample.details
    return {**{f"reward_{name}": value for name, value in of.rewards.items()}, **of.columns, **of.notes}


class WeightsAndBiases:
    """A run of `project` on the server that wandb is set up for; WANDB_MODE=offline writes only files to `folder`."""

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]):
        import wandb  # an optional extra

        self._run = wandb.init(project=project, name=folder.name, dir=str(folder), config=dict(config))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def write_samples(self, name: str, step: int, samples: Sequence[Sample]) -> None:
        import wandb

        details = [_detailed(sample) for sample in samples]
        names = list(dict.fromkeys(chain(*details)))
        rows = [
            [s.sample, s.prompt, s.response, s.reward, *map(of.get, names)]
            for s, of in zip(samples, details, strict=True)
        ]
        table = wandb.Table(columns=["sample", "prompt", "response", "reward", *names], data=rows)
        self._run.log({name: table}, step=step)

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """All trackers that a run asks for; they get each line that the master records."""

    def __init__(self, spec: RunSpec, folder: Path):
        self._trackers: list[Tracker] = []
        if spec.tensorboard:
            self._trackers.append(TensorBoard(folder / "tensorboard", spec.resume_step))
        if spec.wandb_project is not None:
            self._trackers.append(WeightsAndBiases(spec.wandb_project, folder, spec.values))

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Takes a line of metrics.jsonl."""
        self._write(metrics["step"], dict(step_values(metrics)))

    def evaluation(self, line: Mapping[str, Any]) -> None:
        """Takes a line of evaluations.jsonl."""
        self._write(line["step"], {f"evaluation/{name}": value for name, value in line.items() if name != "step"})

    def samples(self, samples: Sequence[Sample]) -> None:
        """Takes the samples of one step, or of one evaluation: `samples/train`, `samples/evaluation`."""
        for tracker in self._trackers if samples else ():
            tracker.write_samples(f"samples/{samples[0].split}", samples[0].step, samples)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.write(step, values)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def step_values(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a line of metrics.jsonl by name: `train/STATISTIC`, `seconds/CALL`, and the fullest worker's
    memory."""
    for name, value in metrics.items():
        if name != "step" and isinstance(value, int | float):
            yield f"train/{name}", value
    for call, times in metrics["calls"].items():
        yield f"seconds/{call}", times["seconds"]
    yield "memory/fullest_worker_gib", max(metrics["peak_bytes"], default=0) / GIB


def check_trackers(spec: RunSpec) -> None:
    """Raises UserError if a tracker's library is not installed; the launcher asks before anything starts."""
    for option, library, is_asked in (
        ("--tensorboard", "tensorboardX", spec.tensorboard),
        ("--wandb", "wandb", spec.wandb_project is not None),
    ):
        if is_asked and find_spec(library) is None:
            raise UserError(
                f"{option} needs the package {library}, which is not installed; "
                f"install it with `pip install {library}`, or leave the option out"
            )
