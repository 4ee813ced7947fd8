"""Results of methods that their objects keep."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def kept(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """The method, of which each object keeps the results by the (hashable) arguments: `functools.cached_property` for
    methods. For objects that do not change; a copy with other fields begins with none."""
    place = f"results of {method.__name__}"  # no name of another attribute

    @functools.wraps(method)
    def result(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        results: dict[Hashable, Any] = self.__dict__.setdefault(place, {})
        key = (args, *kwargs.items())
        if key not in results:
            results[key] = method(self, *args, **kwargs)
        found: R = results[key]
        return found

    return result
