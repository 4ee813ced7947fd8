"""The interface of launchers, and how `--launcher NAME` finds one."""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

from realhf.base.code_files import add_to_search_path, load_code_file
from realhf.base.errors import UserError
from realhf.launch.process import Job
from realhf.rundir.run import MAX_DEVICES

# For a process whose end only the cluster knows.
UNKNOWN_RETURNCODE = 255


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a process ended: with an exit code, or -N if signal N killed it (as in subprocess).

    `note` is the cluster's reason, such as a node failure.
    """

    name: str
    returncode: int
    note: str = ""

    @property
    def is_killed(self) -> bool:
        return self.returncode < 0


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The options of a launcher that has none."""


class Launcher(Protocol):
    """Starts, watches and ends the processes of a run, and knows the places of its workers: devices or nodes.

    It is used from one thread, and starts one job at a time: the next one after `stop`. A class that inherits from
    this one needs `start`, `poll` and `stop`; the other methods have a default.
    """

    options_type: ClassVar[type[Any]] = NoOptions
    """A frozen dataclass whose fields have defaults; its `option` fields are on the command line too."""

    is_remote: ClassVar[bool] = False
    """Whether the processes run on other machines, which see the run directory through a shared file system."""

    queues: ClassVar[bool] = False
    """Whether its jobs wait in a cluster's queue, and go on without the process that has started them."""

    uses_terminal: ClassVar[bool] = False
    """Whether what runs may use the terminal, as a debugger does."""

    def __init__(self, options: Any) -> None:
        """`options`: of `options_type`."""

    def check(self) -> None:
        """Raises UserError where no job could be started, whatever its plan: before one is searched."""
        return None

    def preview(self, job: Job) -> str:
        """The actions of `start`, as text: the batch script, for example. Raises UserError as `start` does."""
        return "".join(f"{process.name}: {' '.join(process.argv)}\n" for process in job.processes)

    def start(self, job: Job) -> None:
        """Starts every process of the job. Raises UserError or RunError if it cannot; then none is left."""
        raise NotImplementedError

    def start_array(self, jobs: Sequence[Job], folder: Path, at_most: int | None) -> list[str]:
        """Starts jobs of one size together, `at_most` at a time (None: all), with files of its own in `folder`; the
        cluster's names of the jobs. Raises as `start`. A launcher that `queues` has it."""
        raise UserError(f"{type(self).__name__} has no queue; start the runs one after the other")

    def poll(self) -> list[Exit]:
        """The processes that have ended since the last poll, the first ones first. Does not wait.

        Raises RunError where the launcher has lost sight of them or gives up, UserError where it finds that they
        cannot run as they were asked for; then none is left.
        """
        raise NotImplementedError

    def stop(self, *, grace_s: float = 5.0) -> None:
        """Ends the remaining processes: asks them (SIGTERM), and kills them after `grace_s`. Returns when all have
        ended.

        May be called at any time; `poll` does not report the processes that it ended. Raises RunError where one cannot
        be ended.
        """
        raise NotImplementedError

    def status(self) -> str:
        """One line for the user about the job, such as "job 17: PENDING (Resources)"; empty if there is nothing."""
        return ""

    def job_id(self) -> str:
        """The cluster's name for the last job; "" where there is none."""
        return ""

    def adopt(self, job: Job, job_id: str) -> None:
        """As `start`, for a job that was started by another process, and goes on or has ended since."""
        raise UserError(f"{type(self).__name__} cannot watch a job that another process has started")

    def leave(self) -> None:
        """Forgets the last job, which goes on: `stop` ends nothing of it."""
        raise UserError(f"the processes of {type(self).__name__} do not outlive this one")

    def is_waiting(self) -> bool:
        """Whether no process of the last job runs, since the cluster will start them, for the first time or again."""
        return False

    def node_devices(self) -> int | None:
        """How many devices each node of a job would have, by what the cluster tells; None: not known."""
        return None

    def place(self, worker: int) -> str | None:
        """Where a worker of the last job was; None: not known."""
        return None

    def lost(self) -> frozenset[str]:
        """The known places of the last job that are not there any more."""
        return frozenset()

    def room(self, avoided: frozenset[str]) -> int:
        """How many workers of the last job there is room for now, without the places `avoided`; by default all."""
        return MAX_DEVICES


def launcher_name(launcher: type[Launcher]) -> str:
    """The name that `find_launcher` knows it by."""
    place = f"{launcher.__module__}:{launcher.__qualname__}"
    return next((name for name, known in LAUNCHERS.items() if known == place), place)


LAUNCHERS: Mapping[str, str] = {
    "local": "realhf.launch.local:LocalLauncher",
    "slurm": "realhf.launch.slurm.launcher:SlurmLauncher",
    "in-process": "realhf.launch.in_process:InProcessLauncher",
}


def find_launcher(name: str, folder: Path | None = None) -> type[Launcher]:
    """The class that `--launcher name` means: a name of `LAUNCHERS`, or `MODULE:CLASS` from elsewhere.

    MODULE is a file (`my_launcher.py`), an installed module, or one in `folder`, the experiment's. Raises UserError if
    there is no such launcher, module or class, or the class lacks members of a launcher.
    """
    module, _, cls = LAUNCHERS.get(name, name).rpartition(":")
    if not (module and cls):
        raise UserError(
            f"--launcher {name}: no such launcher; choose from {', '.join(LAUNCHERS)}, or name a class as MODULE:CLASS "
            "(my_launcher:MyLauncher) or FILE.py:CLASS"
        )
    loaded = _load(name, module, folder)
    found = getattr(loaded, cls, None)
    if not isinstance(found, type):
        classes = sorted(key for key, value in vars(loaded).items() if isinstance(value, type))
        raise UserError(
            f"--launcher {name}: {loaded.__file__} has no class {cls!r}; it has {', '.join(classes) or 'none'}"
        )
    if lacking := _lacking(found):
        raise UserError(
            f"--launcher {name}: {cls} in {loaded.__file__} has no {', '.join(lacking)}; see "
            "realhf.launch.launcher.Launcher"
        )
    return cast(type[Launcher], found)


def _load(name: str, module: str, folder: Path | None) -> Any:
    if folder is not None:
        add_to_search_path(folder)
    try:
        return load_code_file(module) if module.endswith(".py") else importlib.import_module(module)
    except UserError as error:
        raise UserError(f"--launcher {name}: {error}") from error
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):  # one that the launcher's imports
            raise UserError(f"--launcher {name}: {module} cannot be imported: {error}") from error
        raise UserError(
            f"--launcher {name}: there is no module {module!r}; put {module.rpartition('.')[2]}.py beside the "
            "experiment, install it, or give the path of the file: FILE.py:CLASS"
        ) from None
    except Exception as error:
        raise UserError(f"--launcher {name}: {module} cannot be imported: {type(error).__name__}: {error}") from error


def _lacking(found: type) -> list[str]:
    """The members of a launcher that a class lacks."""
    members = [name for name in vars(Launcher) if not name.startswith("_")]
    methods = [name for name in members if inspect.isfunction(vars(Launcher)[name])]
    bare = {name for name in ("start", "poll", "stop") if getattr(found, name, None) is vars(Launcher)[name]}
    lacking = [name for name in methods if name in bare or not callable(getattr(found, name, None))]
    lacking += [name for name in members if name not in methods and not hasattr(found, name)]
    if not lacking and not is_dataclass(getattr(found, "options_type", None)):
        lacking = ["options_type that is a dataclass"]
    return lacking
