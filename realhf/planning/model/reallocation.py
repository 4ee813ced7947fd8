"""Seconds of a parameter reallocation between two layouts."""

from collections.abc import Sequence
from dataclasses import dataclass

from realhf.architecture.model import DecoderConfig
from realhf.geometry.layout import DeviceMesh, Layout, held_layers
from realhf.planning.cluster import Cluster, share_a_node
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.sizes import model_sizes


@dataclass(frozen=True)
class Reallocation:
    """Moves of a model's parameters, `item` bytes an element, over `links` (`Timings.links`).

    forwarding: devices send on what several of them lack; on the way to an average they do not.
    """

    model: DecoderConfig
    item: int
    cluster: Cluster
    links: Hardware
    forwarding: bool = True

    def seconds(self, moved: tuple[int, int], source: DeviceMesh, *, crosses_nodes: bool) -> float:
        """Seconds of a move from the devices of `source`, from what it moves (`moved_elements`).

        The time is that of the busiest link: the most that one device receives, or an equal share, for each device of
        the source, of what is sent: with `forwarding` of the model at most, since devices forward what several lack
        (`realhf.realloc.plan.broadcast_chain`; 0.96 to 1.5 times this in 400 pairs of layouts of up to 16 devices).
        Links between nodes are used unless both meshes are within one node. Zero if nothing moves.
        """
        worst, total = moved
        if not total:
            return 0.0
        sent = (min(total, model_sizes(self.model).total) if self.forwarding else total) / source.size
        return self.links.send_s(max(worst, sent) * self.item, crosses_nodes=crosses_nodes)

    def table(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> list[float]:
        """`seconds` of sources x targets, row-major: for a few pairs; the search has millions, and C++ for them."""
        return [
            self.seconds(
                moved_elements(self.model, source, target),
                source.mesh,
                crosses_nodes=not share_a_node(self.cluster, source.mesh, target.mesh),
            )
            for source in sources
            for target in targets
        ]


def moved_elements(model: DecoderConfig, source: Layout, target: Layout) -> tuple[int, int]:
    """(elements that the worst device of `target` lacks, elements that all of its devices lack).

    A device lacks the boxes it needs under `target` minus those it holds under `source`
    (`realhf.geometry.boxes.device_boxes`); here in closed form, from the two pairs of pipeline
    and tensor index. The search's tables come from the same formula in C++, which
    knows neither model chunks nor micro data-parallel groups.
    """
    worst = total = 0
    for device in target.mesh.devices:
        lacking = _held_by_both(model, (target, target), device) - _held_by_both(model, (source, target), device)
        worst, total = max(worst, lacking), total + lacking
    return worst, total


def _held_by_both(model: DecoderConfig, layouts: tuple[Layout, Layout], device: int) -> int:
    """Elements that `device` holds under both layouts."""
    if any(device not in layout.mesh.devices for layout in layouts):
        return 0
    sizes = model_sizes(model)
    begins, ends, layers, embeddings, heads = [], [], [], [], []
    whole = layouts[0].strategy.tp * layouts[1].strategy.tp
    for layout in layouts:
        _, tp_index, stage = layout.coordinates(device)
        last = layout.strategy.pp - 1
        begins.append(tp_index * whole // layout.strategy.tp)
        ends.append((tp_index + 1) * whole // layout.strategy.tp)
        layers.append(held_layers(model.num_layers, layout.strategy, stage))
        embeddings.append(stage == 0 or (sizes.tied and stage == last))
        heads.append(stage == last)
    common = len(layers[0] & layers[1])
    sharded, replicated = common * sizes.layer_sharded, common * sizes.layer_replicated
    if all(embeddings):
        sharded, replicated = sharded + sizes.embedding_sharded, replicated + sizes.embedding_replicated
    if all(heads):
        sharded, replicated = sharded + sizes.head_sharded, replicated + sizes.head_replicated
    return sharded * max(min(ends) - max(begins), 0) // whole + replicated
