"""The output of `realhf profile`: profiles that are kept, constants, times of layers."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from realhf.cli.output import Output, table_of
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.measured import (
    MeasuredConstants,
    Measurement,
    constants_path,
    load_constants,
    measurement_of,
)
from realhf.planning.model.profile import LayerProfile, load_profile
from realhf.profiling.job import ProfileTarget
from realhf.profiling.measure import ProfileRequest


def missing_of(
    targets: Sequence[ProfileTarget], hardware: Hardware, request: ProfileRequest, force: bool, out: Output
) -> list[ProfileTarget]:
    """The targets that are to be measured; says of the others that they are kept. Raises UserError for a broken one."""
    missing = []
    for target in targets:
        path = target.path(hardware.name, request.profiles_dir)
        if force or not path.is_file():
            missing.append(target)
        else:
            load_profile(path)
            out.say(f"kept {path} (--force measures again)")
    return missing


def show(out: Output, hardware: Hardware, request: ProfileRequest, profiles: Sequence[Path]) -> None:
    """The measurements, and their files."""
    if request.constants:
        path = constants_path(hardware.name, request.profiles_dir)
        out.print(constants_table(load_constants(path), hardware, request.constants))
        out.say(f"written to {path}; plans take these constants as long as the file is there")
    for path in profiles:
        profile = load_profile(path)
        out.print(timings_table(profile))
        out.say(*overhead_lines(profile), *noise_lines(profile), f"written to {path}")


def constants_table(found: MeasuredConstants, described: Hardware, asked: Sequence[Measurement]) -> Table:
    """The constants that were asked for, beside the description's."""
    table = table_of(f"constants of {found.hardware}", "constant", "measured", "+-", "described")
    for name, constant in found.constants.items():
        if measurement_of(name) in asked:
            before = f"{described.constant(name):.3g}" if described.has_constant(name) else "-"
            table.add_row(name, f"{constant.value:.3g}", f"{constant.spread:.0%}", before)
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


def noise_lines(profile: LayerProfile) -> Iterator[str]:
    """The curves that noise spoiled, and what helps."""
    if profile.noisy:
        yield (
            "noisy even after measuring again, so these are levelled and predictions with them are rough: "
            + "; ".join(profile.noisy)
        )
        readings = 2 * int(profile.measured.get("repetitions", 1))
        yield f"end other programs on this machine and measure again with --force --repetitions {readings}"


def overhead_lines(profile: LayerProfile) -> Iterator[str]:
    """Times of collectives, calls, sampling and the optimizer."""
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
