"""How an experiment names the code of an algorithm without importing it.

The launcher, the planner and the master never import torch. An experiment therefore lists
`InterfaceConfig` objects, which only say where the implementation is; the model workers load it.
"""

import importlib.util
from dataclasses import dataclass
from typing import ClassVar

from realhf.api.errors import UserError


@dataclass(frozen=True, kw_only=True)
class InterfaceConfig:
    """The settings of an interface; subclass it, add fields, and name the implementation.

    `implementation` is `module:Class`, where the module is an installed one or a file beside the
    experiment's (`my_reward:MyReward` for my_reward.py). The class is made once per call on every
    worker of the call's mesh with this configuration as its only argument, and has one or more of
    the methods `generate`, `inference` and `train_step` (see `realhf.engine.interface`).
    """

    implementation: ClassVar[str]

    sequence_keys: ClassVar[tuple[str, ...]] = ()
    """The input keys whose tokens the model reads; empty: a prompt and its response. For the planner."""

    uses_model: ClassVar[bool] = True
    """Whether its methods ask the model for anything. False, for rules over the data alone: its calls may name a
    transfer protocol that cuts the batch in any way (`ModelFunctionCallDef.protocol`), and are planned as no pass."""


def check_implementation(call: str, config: InterfaceConfig) -> None:
    """Looks for the module that implements `config`, without importing it.

    Raises:
        UserError: `implementation` is no `module:Class`, or there is no such module.
    """
    name, implementation = type(config).__name__, getattr(config, "implementation", None)
    module, _, cls = str(implementation).partition(":")
    if not (module and cls):
        raise UserError(
            f"{call}: {name} has implementation={implementation!r}; give it the class attribute "
            'implementation: ClassVar[str] = "module:Class"'
        )
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # a package above it
        found = None
    if found is None:
        raise UserError(
            f"{call}: {name} is implemented in a module {module!r}, which is not there; put the file "
            f"{module.rpartition('.')[2]}.py beside the experiment's, or install the package"
        )
