"""A model whose parameters follow those of another one: an average for a reference model, a copy for stale rollouts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from realhf.api.errors import UserError
from realhf.api.model import DecoderConfig


@dataclass(frozen=True)
class Follow:
    """After every `every_steps`-th step of the run, parameters become eta * source's + (1 - eta) * their own.

    `source` is the name of a trained model. With eta=1 they are replaced: a copy that is up to `every_steps` steps old.
    The average is rounded to the models' dtype each time: in bfloat16 changes below 1/256 of a value are lost, so
    keep averages of small `eta` in float32.

    With staleness=1 that happens before the source's training of the step in place of after it, so that what the
    target does in the next step does not wait for this training. With eta=1 it then uses weights exactly one step old,
    whatever the plan, and however long calls take.

    Raises:
        UserError: at construction, `eta` is not above 0 and at most 1, `every_steps` is below 1, or `staleness` is
            neither 0 nor 1.
    """

    source: str
    eta: float = field(kw_only=True)
    every_steps: int = field(default=1, kw_only=True)
    staleness: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if not 0 < self.eta <= 1:
            raise UserError(
                f"Follow({self.source!r}): eta={self.eta:g} is the weight of the source in an average; give a number "
                "above 0 and at most 1"
            )
        if self.every_steps < 1:
            raise UserError(f"Follow({self.source!r}): every_steps={self.every_steps} must be at least 1")
        if self.staleness not in (0, 1):
            raise UserError(
                f"Follow({self.source!r}): staleness={self.staleness} must be 0 or 1: the target is one copy, with the "
                "weights before or after the training of a step"
            )


@dataclass(frozen=True, kw_only=True)
class FollowNode:
    """A node of the dataflow graph: parameters of `target` follow those of `source`.

    It comes after the target's calls of a step and before those of the next; and after the source's training of the
    step, or with `staleness` 1 before it.
    """

    name: str
    target: str
    source: str
    eta: float
    every_steps: int
    staleness: int = 0

    def is_due(self, step: int) -> bool:
        """Whether it happens in `step`, counted from 0."""
        return (step + 1) % self.every_steps == 0

    def version(self, step: int) -> int:
        """How many steps of the source's training the target has seen when its calls of `step` run."""
        return max(0, step // self.every_steps * self.every_steps - self.staleness)


def follow_nodes(
    follows: Mapping[str, Follow], models: Mapping[str, DecoderConfig], trained: set[str]
) -> dict[str, FollowNode]:
    """The nodes by name, for `follows` by the name of the target.

    Raises:
        UserError: the source is no trained model of the graph, the target is none of it or trained itself, or their
            architectures differ.
    """
    nodes = {}
    for target, follow in follows.items():
        source, says = follow.source, f"model {target!r} follows {follow.source!r}"
        if target not in models:
            raise UserError(f"{says} but no call uses it; the calls use {', '.join(sorted(models))}")
        if source not in trained:
            others = ", ".join(sorted(trained)) or "none"
            raise UserError(f"{says}, which no call trains, so that it never changes; trained models: {others}")
        if target in trained:
            raise UserError(f"{says} but is trained itself; leave out follows, or the train_step call of {target!r}")
        if models[target] != models[source]:
            raise UserError(
                f"{says} but they have two architectures, {models[target]} and {models[source]}; give their calls "
                "one model_type"
            )
        name = f"{target}_follows_{source}"
        nodes[name] = FollowNode(
            name=name,
            target=target,
            source=source,
            eta=follow.eta,
            every_steps=follow.every_steps,
            staleness=follow.staleness,
        )
    return nodes
