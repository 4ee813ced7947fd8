"""A run's metrics for TensorBoard, Weights & Biases and trackio, beside metrics.jsonl."""

import os
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


class LoggedRun:
    """A run of a library with wandb's interface: `run.log` takes numbers and tables."""

    def __init__(self, library: Any, run: Any):
        self._library, self._run = library, run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def write_samples(self, name: str, step: int, samples: Sequence[Sample]) -> None:
        details = [_detailed(sample) for sample in samples]
        names = list(dict.fromkeys(chain(*details)))
        rows = [
            [s.sample, s.prompt, s.response, s.reward, *map(of.get, names)]
            for s, of in zip(samples, details, strict=True)
        ]
        table = self._library.Table(columns=["sample", "prompt", "response", "reward", *names], data=rows)
        self._run.log({name: table}, step=step)

    def close(self) -> None:
        self._run.finish()


def weights_and_biases(project: str, folder: Path, config: Mapping[str, Any]) -> LoggedRun:
    """A run of `project` on the server that wandb is set up for; WANDB_MODE=offline writes only files to `folder`."""
    import wandb  # an optional extra

    return LoggedRun(wandb, wandb.init(project=project, name=folder.name, dir=str(folder), config=dict(config)))


def trackio_run(project: str, folder: Path, config: Mapping[str, Any], resume_step: int) -> LoggedRun:
    """A run of `project` in trackio's database on this machine; nothing is sent. One that resumes goes on with the
    newest run of its name, in which steps that are made again then stand twice."""
    library, resume = _trackio(), "allow" if resume_step else "never"
    quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
    run = library.init(project=project, name=folder.name, config=dict(config), resume=resume, **quiet)
    return LoggedRun(library, run)


def _trackio() -> Any:
    """The library, without the network: it would ask Hugging Face for the name of a user who has a token."""
    offline = "HF_HUB_OFFLINE"  # read when huggingface_hub is imported; other processes are to start without it
    is_given = offline in os.environ
    os.environ.setdefault(offline, "1")
    try:
        import trackio  # an optional extra
    finally:
        if not is_given:
            del os.environ[offline]
    return trackio


class Trackers:
    """All trackers that a run asks for; they get each line that the master records."""

    def __init__(self, spec: RunSpec, folder: Path):
        self._trackers: list[Tracker] = []
        if spec.tensorboard:
            self._trackers.append(TensorBoard(folder / "tensorboard", spec.resume_step))
        if spec.wandb_project is not None:
            self._trackers.append(weights_and_biases(spec.wandb_project, folder, spec.values))
        if spec.trackio_project is not None:
            self._trackers.append(trackio_run(spec.trackio_project, folder, spec.values, spec.resume_step))

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
        if name not in ("step", "of_steps") and isinstance(value, int | float):
            yield f"train/{name}", value
    for call, times in metrics["calls"].items():
        yield f"seconds/{call}", times["seconds"]
    yield "memory/fullest_worker_gib", max(metrics["peak_bytes"], default=0) / GIB


def check_trackers(spec: RunSpec) -> None:
    """Raises UserError if a tracker's library is not installed, or is set up for something else than the options ask
    for; the launcher asks before anything starts."""
    for option, library, is_asked in (
        ("--tensorboard", "tensorboardX", spec.tensorboard),
        ("--wandb", "wandb", spec.wandb_project is not None),
        ("--trackio", "trackio", spec.trackio_project is not None),
    ):
        if is_asked and find_spec(library) is None:
            raise UserError(
                f"{option} needs the package {library}, which is not installed; "
                f"install it with `pip install {library}`, or leave the option out"
            )
    if spec.trackio_project is not None:
        _check_trackio(spec.trackio_project)


def _check_trackio(project: str) -> None:
    """Raises UserError for a name that trackio refuses, and where it would send metrics elsewhere."""
    try:
        _trackio().SQLiteStorage.validate_project_name(project)
    except ValueError as error:
        raise UserError(f"--trackio {project}: {error} Give the project another name") from None
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        if os.environ.get(name):
            raise UserError(
                f"{name}={os.environ[name]} has trackio send metrics there, and --trackio {project} writes them on "
                f"this machine alone; unset {name}, and copy the project with `trackio sync` when the run has ended"
            )
