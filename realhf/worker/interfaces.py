"""The code that a user's configuration names: loaded when a worker starts, run, and blamed for its exceptions."""

import importlib
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import realhf
from realhf.base.errors import UserError
from realhf.dataflow.graph import WEIGHTS_VERSION, ModelFunctionCallDef
from realhf.dataflow.interface import lacks_class, lacks_method
from realhf.engine.backend import EngineModel
from realhf.engine.batch import Batch, concatenate
from realhf.engine.interface import CallResult, Model
from realhf.engine.returned import InterfaceError, check_result, check_state
from realhf.worker.call_context import CallContext, UnusedModel


def load_interface(call: ModelFunctionCallDef) -> Any:
    """The implementation that the class of `call.interface_impl` names, made with it. The name comes from the
    experiment's code, never from a message.

    Raises:
        InterfaceError: there is no such class in the module, or it lacks the method that the call needs.
    """
    config = call.interface_impl
    module_name, _, name = type(config).implementation.partition(":")
    module = importlib.import_module(module_name)
    cls = getattr(module, name, None)
    if cls is None:
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise InterfaceError(lacks_class(call.name, config, module.__file__, classes))
    interface, method = cls(config), call.interface_type.value
    if not callable(getattr(interface, method, None)):
        raise InterfaceError(lacks_method(call.name, config, module.__file__, method))
    return interface


def run_interface(
    interface: Any,
    call: ModelFunctionCallDef,
    sharded: Model | None,
    mini_batches: Sequence[Batch],
    context: CallContext,
) -> CallResult:
    """The interface's checked result of a call; the numbers that it leaves in `context.state` are checked too. A call
    beside the devices has no model (None).

    Raises:
        InterfaceError: naming the call, and the method that broke a rule.
    """
    method = getattr(interface, call.interface_type.value)
    model: Any = sharded if call.uses_model else UnusedModel(call)
    batch = concatenate(mini_batches)
    try:
        result = check_result(
            method(model, mini_batches if call.trains else batch, context),
            batch.ids,
            declared=set(call.output_data) - {WEIGHTS_VERSION},
            recorded=context.record,
            holds_outputs=context.holds_outputs,
        )
        context.state = check_state(context.state)
    except InterfaceError as error:
        what = f"{call.name}: {_describe(method)}: {error}"
        raise InterfaceError(what).with_traceback(error.__traceback__) from None
    return result


def complete_schedule(call: ModelFunctionCallDef, model: EngineModel, steps: int) -> None:
    """Counts optimizer steps that a training left out (it stopped early, or a mini-batch had nothing to learn from) as
    steps of the schedule: a checkpoint then has the number of steps that the run has planned.

    `steps`: of the model, through the end of the call.

    Raises:
        InterfaceError: it made more steps than its mini-batches and epochs are.
    """
    if model.optimizer_steps > steps:
        planned = call.optimizer_steps
        made = planned + model.optimizer_steps - steps
        raise InterfaceError(
            f"{call.name}: its train_step made {made} optimizer steps, more than mini_batches={call.mini_batches} x "
            f"epochs={call.passes}; the learning rate is scheduled for {planned}: set `epochs` of "
            f"{type(call.interface_impl).__name__}"
        )
    model.optimizer_steps = steps


def explain(error: BaseException) -> str:
    """The text of an exception for the user, with the traceback's frames in the user's own files.

    If there are none, it has all frames. An InterfaceError or a UserError needs no frames: its text names the place.
    """
    report = traceback.TracebackException.from_exception(error)
    chain = list(_chain(report))
    if any(_is_users(frame) for link in chain for frame in link.stack):
        for link in chain:
            link.stack = traceback.StackSummary.from_list([frame for frame in link.stack if _is_users(frame)])
    elif isinstance(error, InterfaceError | UserError):
        return str(error)
    return "".join(report.format())


def _describe(method: Callable[..., Any]) -> str:
    """`MyReward.inference (/home/me/my_reward.py, line 12)`."""
    code = getattr(method, "__code__", None)
    name = getattr(method, "__qualname__", repr(method))
    return f"{name} ({code.co_filename}, line {code.co_firstlineno})" if code else name


def _chain(report: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    link: traceback.TracebackException | None = report
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


_OTHERS = (str(Path(realhf.__file__).parent), *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")))


def _is_users(frame: traceback.FrameSummary) -> bool:
    """Whether it is in a file that is neither this package's, nor Python's, nor an installed package's."""
    name = frame.filename
    is_installed = {"site-packages", "dist-packages"} & set(Path(name).parts)
    return not (name.startswith(("<", *_OTHERS)) or is_installed)
