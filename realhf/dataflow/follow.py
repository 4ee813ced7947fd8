"""A model whose parameters follow those of another one: an average for a reference model, a copy for stale rollouts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError


@dataclass(frozen=True)
class Follow:
    """After every `every_steps`-th step of the run, parameters become eta * source's + (1 - eta) * their own.

    `source` is the name of a trained model. With eta=1 they are replaced: a copy that is up to `every_steps` steps old.
    The average is rounded to the models' dtype each time: in bfloat16 changes below 1/256 of a value are lost, so
    keep averages of small `eta` in float32.

    With staleness=k, above 0, the copy is made before the source's training of the step, and the target uses it k steps
    later. In step t the target has weights that have seen t - k steps of training, under every plan and every timing;
    in the first k steps it has its initial weights. So it does not wait for the training of the last k steps. It keeps
    k versions of its parameters, all on the devices of its home.

    Raises:
        UserError: at construction, `eta` is not above 0 and at most 1, `every_steps` is below 1, `staleness` is below
            0, or it is above 1 for anything but a copy after every step.
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
        if self.staleness < 0:
            raise UserError(f"Follow({self.source!r}): staleness={self.staleness} must be at least 0")
        if self.staleness > 1 and (self.eta, self.every_steps) != (1, 1):
            raise UserError(
                f"Follow({self.source!r}): staleness={self.staleness} is for copies of the weights of single steps; "
                "give eta=1 and every_steps=1, or a staleness of 0 or 1"
            )


@dataclass(frozen=True, kw_only=True)
class FollowNode(Follow):
    """A node of the dataflow graph: parameters of `target` follow those of `source`.

    It comes after the target's calls of a step and before those of the next, and after the source's training of the
    step. With a `staleness` k it comes before that training, and before the target's calls of k steps later.
    """

    target: str

    @property
    def name(self) -> str:
        return f"{self.target}_follows_{self.source}"

    def is_due(self, step: int) -> bool:
        """Whether the parameters follow in `step`, counted from 0."""
        return (step + 1) % self.every_steps == 0

    @property
    def versions(self) -> int:
        """How many versions of its parameters the target keeps."""
        return max(1, self.staleness)

    def brings(self, step: int) -> int:
        """The version that `step` makes: how many training steps the source has seen."""
        return step if self.staleness else step + 1

    def version(self, step: int) -> int:
        """The version that the target's calls of `step` use; 0 and below are its initial weights."""
        return step // self.every_steps * self.every_steps - self.staleness


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
        node = FollowNode(**vars(follow), target=target)
        nodes[node.name] = node
    return nodes
