"""`@auto`: what makes a dataclass, or a script, an experiment."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypedDict, TypeVar, Unpack, cast, overload

from realhf.api.experiment import SETTINGS_ATTRIBUTE, AutoSettings
from realhf.api.script.experiment import experiment_class
from realhf.base.errors import UserError
from realhf.dataflow.pools import Pool

T = TypeVar("T")


class Place(TypedDict, total=False):
    """Where an experiment runs, in the words of `realhf run`: --nodelist (`node[01-02]`), --nodes, --gpus-per-node and
    --launcher."""

    nodelist: str | None
    nodes: int
    gpus_per_node: int
    launcher: str


class Auto(Protocol):
    """What `auto` gives: a decorator of dataclasses, or of scripts."""

    @overload
    def __call__(self, what: type[T]) -> type[T]: ...
    @overload
    def __call__(self, what: Callable[..., None]) -> type[Any]: ...


def auto(
    *,
    batch_size: int,
    max_steps_in_flight: int = 2,
    search_evaluations: int | None = None,
    pools: Mapping[str, Pool] | None = None,
    steps: int | None = None,
    mini_batches: int | None = None,
    **place: Unpack[Place],
) -> Auto:
    """Makes a dataclass an experiment that `realhf run` can plan, schedule and launch (ReaL, section 4); or a function
    whose body calls models one after the other, a script (HybridFlow, section 3), for which it makes the dataclass.

    Args:
        batch_size: samples a step (the global batch).
        place: where it runs, unless the command line says otherwise; see `Place`.
        max_steps_in_flight: how many steps may overlap, at most; a searched plan has fewer where that is faster, and
            at least k + 1 where a model follows another with a staleness of k.
        search_evaluations: the budget of the plan search as a number of plans, so that a plan can be reproduced; None:
            a budget that grows with the number of options.
        pools: by name, models that are confined to some of the devices. A property `pools` overrides it.
        steps, mini_batches: of a script, the defaults of these fields.

    Raises:
        UserError: the class is no dataclass or lacks a field or property that an experiment needs, or the script has a
            parameter that it cannot have.
    """
    settings = AutoSettings(
        batch_size=batch_size,
        **place,
        max_steps_in_flight=max_steps_in_flight,
        search_evaluations=search_evaluations,
        pools=pools or {},
    )

    def decorate(cls: Any) -> Any:
        if not isinstance(cls, type):
            made = experiment_class(cls, batch_size=batch_size, steps=steps, mini_batches=mini_batches)
            setattr(made, SETTINGS_ATTRIBUTE, settings)
            return made
        if steps is not None or mini_batches is not None:
            raise UserError(
                f"@auto on {cls.__name__}: steps and mini_batches are fields of a dataclass; set them there"
            )
        if not dataclasses.is_dataclass(cls):
            raise UserError(f"@auto on {cls.__name__}: write @dataclass below @auto, so that it has fields to set")
        fields = {field.name for field in dataclasses.fields(cls)}
        missing = [name for name in ("seed", "steps") if name not in fields]
        missing += [name for name in ("rpcs", "dataset") if not hasattr(cls, name)]
        if missing:
            raise UserError(
                f"@auto on {cls.__name__}: {', '.join(missing)} missing; an experiment has the fields seed and steps "
                "and the properties rpcs and dataset (and, where needed, models and evaluation)"
            )
        setattr(cls, SETTINGS_ATTRIBUTE, settings)
        return cls

    return cast(Auto, decorate)
