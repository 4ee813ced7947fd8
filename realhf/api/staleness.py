"""Rollouts by older weights in an experiment that asks for none itself: a copy of the trained model generates."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from realhf.api.experiment import ModelSetup, follows_of, models_of, pools_of
from realhf.base.errors import UserError
from realhf.base.numbers import STALENESS, check_range
from realhf.dataflow.follow import Follow
from realhf.dataflow.graph import DataflowGraph, ModelFunctionCallDef


def copy_name(model: str) -> str:
    """The name of the model that generates in place of `model`."""
    return f"{model}_rollout"


def stale_calls(calls: Sequence[ModelFunctionCallDef], staleness: int) -> list[ModelFunctionCallDef]:
    """The calls, under their names, where copies of trained models generate in place of these; the calls as they are
    where `staleness` is 0.

    Raises:
        UserError: `staleness` is out of its range, no trained model generates, or a copy's name is taken.
    """
    check_range("staleness", staleness, *STALENESS)
    if not staleness:
        return list(calls)
    moved = _generating(calls)
    if not moved:
        raise UserError(
            f"staleness {staleness} is for generation by a model that the experiment trains, and it has no such "
            "call (a copy may generate already, by the experiment's own staleness); leave out --staleness and "
            "--staleness-up-to"
        )
    for call in calls:
        if call.model_name in map(copy_name, moved):
            raise UserError(
                f"staleness {staleness} makes a model {call.model_name!r}, and the experiment has one of this name; "
                "give that another name, or take a staleness of 0"
            )
    return [
        replace(call, name=call.name, model_name=copy_name(call.model_name))
        if call.generates and call.model_name in moved
        else call
        for call in calls
    ]


def setups_of(experiment: Any, staleness: int = 0) -> dict[str, ModelSetup]:
    """The setup of every model, copies for stale rollouts among them. Raises UserError as `models_of`."""
    setups = models_of(experiment)
    for model in _generating(experiment.rpcs) if staleness else ():
        follows = Follow(model, eta=1.0, staleness=staleness)
        setups[copy_name(model)] = replace(setups[model], optimizer=None, with_optimizer=False, follows=follows)
    return setups


def graph_of(
    experiment: Any,
    staleness: int = 0,
    *,
    calls: Sequence[ModelFunctionCallDef] | None = None,
    keys: Sequence[str] | None = None,
) -> DataflowGraph:
    """The dataflow graph of an experiment, or of other `calls` of its models, whose data set has these `keys`.

    With a staleness of k generation of step t has the weights of k steps of training before, as a copy of the model
    keeps them (`Follow`). A copy is confined to the pool of its model.

    Raises:
        UserError: as `DataflowGraph` and `stale_calls`.
    """
    calls = experiment.rpcs if calls is None else calls
    keys = experiment.dataset.keys if keys is None else keys
    follows, pools = follows_of(experiment), dict(pools_of(experiment))
    for model in _generating(calls) if staleness else ():
        follows[copy_name(model)] = Follow(model, eta=1.0, staleness=staleness)
        if model in pools:
            pools[copy_name(model)] = pools[model]
    return DataflowGraph(stale_calls(calls, staleness), keys, follows, pools)


def _generating(calls: Sequence[ModelFunctionCallDef]) -> list[str]:
    """The trained models that generate."""
    trained = {call.model_name for call in calls if call.trains}
    return list(dict.fromkeys(call.model_name for call in calls if call.generates and call.model_name in trained))
