"""`realhf profile`: measure layers, decode steps and collectives of this machine, once per model type."""

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from realhf.cli.options import add_experiment, add_options, options_of
from realhf.cli.output import Output, Phases, table_of
from realhf.lifecycle.request import experiment_of
from realhf.planning.clusters import cluster_of, hardware_text
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.measured import (
    MeasuredConstants,
    Measurement,
    constants_path,
    load_constants,
    measurement_of,
)
from realhf.planning.model.profile import LayerProfile, load_profile
from realhf.planning.model.uncertainty import constant as constant_of
from realhf.planning.model.uncertainty import is_constant
from realhf.planning.request import DevicesRequest
from realhf.profiling.measure import ProfileRequest, measure, targets_of

DESCRIPTION = """Measures forward, backward and decode of a single layer, embedding and head, the optimizer, the way of
a request and the collectives on this machine, for every model type of an experiment. `realhf plan` and
`realhf run` then predict from what was measured. Once per model type, dtype and machine is enough.
Any field of the experiment can be given as --field value."""

EXAMPLE = """examples:
  realhf profile experiments/ppo.py
  realhf profile experiments/ppo.py --num-workers 2 --force
  realhf profile experiments/ppo.py --only links,memory    (constants of the machine, in seconds)
  realhf profile experiments/ppo.py --architecture.hidden-size 512 --max-tokens 8192"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_experiment(command)
    command.add_argument("--num-workers", type=int, help="devices to use (default: the GPUs here, else the CPU cores)")
    command.add_argument("--hardware", help="a hardware description, such as h100 or cpu (default: this machine)")
    add_options(command, ProfileRequest)
    command.add_argument("--force", action="store_true", help="measure again what was measured already")


def execute(arguments: argparse.Namespace) -> int:
    request = options_of(ProfileRequest, arguments)
    devices = DevicesRequest(num_workers=arguments.num_workers, hardware=arguments.hardware, place="here")
    experiment = experiment_of(arguments.experiment, arguments.overrides)
    cluster, out = cluster_of(devices), Output()
    targets = targets_of(experiment, cluster, request) if request.models else []
    missing = [target for target in targets if arguments.force or not Path(target.path).is_file()]
    for target in targets:
        if target not in missing:
            load_profile(target.path)
            out.say(f"kept {target.path} (--force measures again)")
    if not missing and not request.constants:
        return 0
    out.say(f"measuring {hardware_text(cluster.hardware, 1, cluster.num_devices)}")
    started = time.monotonic()
    with Phases() as watch:
        measure(experiment, cluster, missing, request, watch)
    if request.constants:
        path = constants_path(cluster.hardware.name, request.profiles_dir)
        out.print(constants_table(load_constants(path), cluster.hardware, request.constants))
        out.say(f"written to {path}; plans take these constants as long as the file is there")
    for target in missing:
        profile = load_profile(target.path)
        out.print(timings_table(profile))
        out.say(*overhead_lines(profile), f"written to {target.path}")
    out.say(f"measured in {time.monotonic() - started:.0f} s")
    return 0


def constants_table(found: MeasuredConstants, described: Hardware, asked: Sequence[Measurement]) -> Table:
    """The constants that were asked for, beside the description's."""
    table = table_of(f"constants of {found.hardware}", "constant", "measured", "+-", "described")
    for name, constant in found.constants.items():
        if measurement_of(name) in asked:
            before = f"{constant_of(described, name):.3g}" if is_constant(described, name) else "-"
            table.add_row(escape(name), f"{constant.value:.3g}", f"{constant.spread:.0%}", before)
    return table


def timings_table(profile: LayerProfile) -> Table:
    """A layer's times in a micro-batch of a middle size and a decode step of a middle number of sequences."""
    sizes = profile.tensor[0].layer_forward.sizes
    tokens = sizes[len(sizes) * 2 // 3]
    batches = profile.tensor[0].layer_decode[0].seconds.sizes
    sequences = batches[len(batches) // 2]
    model = profile.model
    title = f"{model.head} model, hidden {model.hidden_size}, {profile.dtype}: one layer, {tokens:.0f} tokens"
    columns = ("tp", "forward ms", "backward ms", "head forward ms", f"decode ms ({sequences:.0f} sequences)")
    table = table_of(title, *columns, words=0)
    for timings in profile.tensor:
        decode = timings.layer_decode[len(timings.layer_decode) // 2].seconds.at(sequences)
        curves = (timings.layer_forward, timings.layer_backward, timings.head_forward)
        seconds = [*(curve.at(tokens) for curve in curves), decode]
        table.add_row(str(timings.tp), *(f"{1000 * s:.3f}" for s in seconds))
    return table


def overhead_lines(profile: LayerProfile) -> Iterator[str]:
    """What collectives, calls, sampling and the optimizer take."""
    for timings in profile.collective("all_reduce"):
        sizes, seconds = timings.seconds.sizes, timings.seconds.seconds
        yield (
            f"all-reduce over {timings.group_size}: {1e6 * seconds[0]:.0f} us for {sizes[0]:.0f} bytes, "
            f"{sizes[-1] / seconds[-1] / 1e9:.2f} GB/s at {sizes[-1] / 2**20:.0f} MiB"
        )
    yield (
        f"call {1000 * profile.call_overhead_s:.2f} ms, sampling {1000 * profile.sampling_s:.2f} ms, "
        f"optimizer {1e9 * profile.optimizer_s_per_parameter:.2f} ns a parameter"
    )
