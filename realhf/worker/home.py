"""The first parameters of a model's home: random weights, a checkpoint, or the state from which a run resumes."""

from pathlib import Path

from realhf.engine.backend import EngineModel
from realhf.models.checkpoint import CheckpointReader
from realhf.models.checkpoint_index import newer_kinds, of_kind
from realhf.models.opening import BoxReader, open_checkpoint
from realhf.rundir.checkpoints import step_folder
from realhf.rundir.run import Run

HEAD_PARAMETERS = ("lm_head.weight", "score.weight")


def fill(model: EngineModel, run: Run, name: str, checkpoints: Path) -> None:
    """Gives `model`, the home of the run's model `name`, its parameters, and optimizer states where they are saved.

    When a run resumes, models that change come from the run's own `checkpoints`. In a new run all versions of a model's
    parameters are equal.

    Raises:
        UserError: a checkpoint is of another architecture, or damaged.
    """
    setup = run.experiment.setups[name]
    if run.spec.resume_step and name in run.changing_models:
        saved = CheckpointReader(step_folder(checkpoints, run.spec.resume_step) / name)
        if model.trains:
            model.load_state(saved)
        else:
            saved.check_architecture(model.config)
            versions = model.residency.versions
            for kind, version in zip(("", *newer_kinds(len(versions))), versions, strict=True):
                model.residency.select_version(version)
                _read(model, saved, kind)
    elif setup.checkpoint is not None and setup.with_optimizer and model.trains:
        model.load_state(CheckpointReader(setup.checkpoint))
    else:
        if setup.checkpoint is None or setup.new_head:
            model.initialise(run.experiment.seed)
        if setup.checkpoint is not None:
            reader = open_checkpoint(setup.checkpoint, run.experiment.graph.models[name], setup.new_head)
            _read(model, reader, without=HEAD_PARAMETERS if setup.new_head else ())
        model.residency.fill_versions()


def _read(model: EngineModel, reader: BoxReader, kind: str = "", without: tuple[str, ...] = ()) -> None:
    for box, tensor in model.residency.held():
        if box.name not in without:
            reader.read_into(tensor, of_kind(box, kind))
    model.residency.written()
    # Updates are smaller than the distance of two bfloat16 values. Copies that begin with what bfloat16 leaves of a
    # float32 checkpoint take many updates to move a parameter; those that begin with its own values move some at once.
    for box, tensor in model.masters():
        if box.name not in without:
            reader.read_into(tensor, box)
