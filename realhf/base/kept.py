"""Results of methods that their objects keep."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")
_NONE_YET: Any = object()


def kept(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """The method, of which each object keeps the results by the (hashable) arguments: `functools.cached_property` for
    methods. For objects that do not change; a copy with other fields begins with none."""
    place = f"results of {method.__name__}"  # no name of another attribute

    @functools.wraps(method)
    def result(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        results: dict[Hashable, Any] | None = self.__dict__.get(place)
        if results is None:
            results = self.__dict__[place] = {}
        key = (args, *kwargs.items()) if kwargs else args
        found: R = results.get(key, _NONE_YET)
        if found is _NONE_YET:
            found = results[key] = method(self, *args, **kwargs)
        return found

    return result
