"""The costs of training a module on this rank, measured before it is wrapped: activations and seconds of a sample, uses
of operators, and the states that the optimizer keeps of an element."""

import statistics
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from realhf.base.errors import UserError
from realhf.parallel.views import storage_id
from realhf.wrapping.operators import is_operator

Example = Callable[[int], Tensor]
OptimizerFactory = Callable[[list[Tensor]], torch.optim.Optimizer]

READINGS = 5
# Between two passes a step goes through gradients, two states and parameters, and leaves the caches full of these.
STEP_ARRAYS, MOST_TOUCHED_BYTES = 4, 2**28
MOST_TIMED_SAMPLES = 8  # in a pass before anything is divided
FEWEST_TRIED, MOST_TRIED = 2**20, 2**23  # elements of an optimizer's vector; more leave the caches as these do
COMPARED_ELEMENTS = 64
# An elementwise optimizer differs by rounding alone; one with norms by factors, for parts that are 100 times larger.
SAME, LARGER = 1e-3, 100.0


@dataclass(frozen=True, kw_only=True)
class SampleCosts:
    """The costs of a forward and backward pass.

    uses: how often a forward pass of each linear or embedding ran, by path; twice where it is computed again.
    products: multiplications of all these passes of a linear with one sample, by path.
    used_elsewhere: the parameters of these that something else has read.
    """

    bytes_per_sample: int
    seconds_per_sample: float
    uses: Counter[str]
    products: Counter[str]
    used_elsewhere: frozenset[str]

    def forward_s(self, paths: Sequence[str]) -> float:
        """Seconds of one forward pass of a sample through an operator, which the modules of `paths` share.

        The seconds of a sample are divided in proportion to products; a backward pass has twice those of a forward one.
        """
        of_all = sum(count * (1 + 2 / self.uses[path]) for path, count in self.products.items())
        own, uses = (sum(counts[path] for path in paths) for counts in (self.products, self.uses))
        return self.seconds_per_sample * own / uses / of_all if own else 0.0


@dataclass(frozen=True, kw_only=True)
class OptimizerCosts:
    """The costs of one element of the parameters.

    accumulate_s: seconds of adding a new gradient to the kept one.
    """

    state_bytes: float
    update_s: float
    accumulate_s: float = 0.0


def sample_costs(module: nn.Module, example: Example, samples: int) -> SampleCosts:
    """Runs `example` on the module: `example(n)` gives the loss of n samples. Parameters and buffers stay as they were.

    Activations are the most bytes alive at the same time, recomputed ones included, gradients of parameters not. Their
    bytes per sample are those that one more sample adds.

    Raises:
        UserError: `example` gives no loss of the module's parameters.
    """
    with _undisturbed(module):
        watches = [_watched(module, example, count) for count in (1, 2)]
        per_sample = max(watches[1].peak_bytes - watches[0].peak_bytes, 0)
        trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        size = min(STEP_ARRAYS * trained, MOST_TOUCHED_BYTES)
        touched = torch.empty(size, dtype=torch.uint8, device=next(module.parameters()).device)
        seconds = []
        with _taking_gradients(module, _drop_gradient):
            for _ in range(READINGS):
                touched.zero_()
                seconds.append(seconds_of(lambda: _run(example, samples), touched.device))
    return SampleCosts(
        bytes_per_sample=per_sample,
        seconds_per_sample=statistics.median(seconds) / samples,
        uses=watches[0].uses,
        products=watches[0].products,
        used_elsewhere=frozenset(watches[0].used_elsewhere),
    )


def activations(module: nn.Module, example: Example, blocks: Sequence[str]) -> tuple[int, Counter[str]]:
    """Bytes that one more sample adds: to the most that are alive at the same time, and by block, to what its forward
    pass leaves alive, its output too."""
    with _undisturbed(module):
        one, two = (_watched(module, example, count, blocks) for count in (1, 2))
    return max(two.peak_bytes - one.peak_bytes, 0), two.kept - one.kept


def optimizer_costs(
    factory: OptimizerFactory, dtype: torch.dtype, device: torch.device, share: int = 0
) -> OptimizerCosts:
    """Tries an optimizer on vectors of its own, with the passes over gradients that a step makes beside it: they are
    divided by the number of ranks, and then zeroed.

    share: elements that every rank updates whatever the modes are. The trial has this size, within bounds: the larger a
        vector, the less of it is in a cache.

    Raises:
        UserError: it makes no steps, or updates elements by more than their own gradients and states.
    """
    _check_elementwise(factory, dtype, device)
    elements = min(max(share, FEWEST_TRIED), MOST_TRIED)
    vector = torch.zeros(elements, dtype=dtype, device=device)
    optimizer = _stepped(factory, [vector], [torch.ones_like(vector)])
    new, gradient = torch.zeros_like(vector), vector.grad
    assert gradient is not None

    def update() -> None:
        gradient.mul_(0.5)
        optimizer.step()
        gradient.zero_()

    updates, additions = [], []
    for _ in range(READINGS):
        updates.append(seconds_of(update, device))
        additions.append(seconds_of(lambda: gradient.add_(new), device))
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return OptimizerCosts(
        state_bytes=sum(value.nbytes for value in states if value.numel() > 1) / elements,
        update_s=statistics.median(updates) / elements,
        accumulate_s=statistics.median(additions) / elements,
    )


def _check_elementwise(factory: OptimizerFactory, dtype: torch.dtype, device: torch.device) -> None:
    """Whether one vector is updated as its two halves are."""
    values = torch.linspace(1e-3, 2e-3, 2 * COMPARED_ELEMENTS)
    values[COMPARED_ELEMENTS:] *= LARGER
    before = values.to(dtype=dtype, device=device)
    whole, halves = before.clone(), [half.clone() for half in before.chunk(2)]
    gradients = torch.linspace(2e-2, 1e-2, len(values)).to(before)  # not in proportion to the values
    optimizer = _stepped(factory, [whole], [gradients])
    _stepped(factory, halves, list(gradients.chunk(2)))
    by_whole, by_halves = whole.double(), torch.cat(halves).double()
    update, rounding = (by_whole - before).abs(), 4 * torch.finfo(dtype).eps * by_whole.abs()
    if ((by_whole - by_halves).abs() > SAME * update + rounding).any():
        raise UserError(
            f"optimizer_factory gave {type(optimizer).__name__}, which updates a vector otherwise than its halves: "
            "ranks keep parts of parameters, so give an elementwise optimizer (SGD, Adam, AdamW, Adagrad, RMSprop)"
        )


def _stepped(factory: OptimizerFactory, vectors: list[Tensor], gradients: list[Tensor]) -> torch.optim.Optimizer:
    """An optimizer that has made two steps."""
    for vector, gradient in zip(vectors, gradients, strict=True):
        vector.grad = gradient
    try:
        optimizer = factory(vectors)
        optimizer.step()
        optimizer.step()
    except Exception as error:
        raise UserError(
            f"optimizer_factory failed on {len(vectors)} vector(s) of {len(vectors[0])} elements: {error}; give a "
            "function from a list of vectors to a torch.optim.Optimizer whose step() needs no closure"
        ) from error
    return optimizer


class _Watch(TorchDispatchMode):
    """Counts the bytes that are alive, and sees who reads which parameter."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.uses: Counter[str] = Counter()
        self.products: Counter[str] = Counter()
        self.used_elsewhere: set[str] = set()
        self.running: list[nn.Linear | nn.Embedding] = []
        self.kept: Counter[str] = Counter()  # by block
        self._changes: list[tuple[int, int]] = []  # (which storage, bytes more or less), in the order of time
        self._alive: dict[int, int] = {}  # by address, the number of the storage there; -1 for parameters
        self._gradients: set[int] = set()
        self._weights: dict[int, str] = {}
        known = {id(p): name for name, p in module.named_parameters()}
        for tensor in [*module.parameters(), *module.buffers()]:
            self._alive[storage_id(tensor)] = -1
        for part in module.modules():
            if is_operator(part):
                self._weights[storage_id(part.weight)] = known[id(part.weight)]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch._C._current_graph_task_id() < 0:  # not of the backward pass, which reads what was saved
            self._note_reads([x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)])
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._add(tensor)
        return output

    def before(self, path: str, part: nn.Linear | nn.Embedding, inputs: tuple[Any, ...]) -> None:
        """A forward pass of an operator begins."""
        self.uses[path] += 1
        if isinstance(part, nn.Linear) and inputs:
            self.products[path] += inputs[0].numel() * part.out_features
        self.running.append(part)

    def after(self, *_: Any) -> None:
        self.running.pop()

    def before_block(self, path: str, *_: Any) -> None:
        self.kept[path] -= sum(size for _, size in self._changes)

    def after_block(self, path: str, *_: Any) -> None:
        self.kept[path] += sum(size for _, size in self._changes)

    def take_gradient(self, parameter: Tensor) -> None:
        """Drops the gradient of a parameter, which is no activation."""
        assert parameter.grad is not None
        self._gradients.add(self._alive.get(storage_id(parameter.grad), -1))
        parameter.grad = None

    @property
    def peak_bytes(self) -> int:
        """The most that was alive, without parameters and their gradients."""
        sums = accumulate(size for number, size in self._changes if number not in self._gradients)
        return max(sums, default=0)

    def _note_reads(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            name = self._weights.get(storage_id(tensor))
            if name is not None and not (self.running and storage_id(self.running[-1].weight) == storage_id(tensor)):
                self.used_elsewhere.add(name)

    def _add(self, tensor: Tensor) -> None:
        storage, address = tensor.untyped_storage(), storage_id(tensor)
        if address in self._alive:
            return
        self._alive[address] = number = len(self._changes)
        self._changes.append((number, storage.nbytes()))
        weakref.finalize(storage, self._remove, address, number, storage.nbytes())

    def _remove(self, address: int, number: int, size: int) -> None:
        self._alive.pop(address, None)
        self._changes.append((number, -size))


def _watched(module: nn.Module, example: Example, samples: int, blocks: Sequence[str] = ()) -> _Watch:
    """Runs `example` on `samples` samples, and watches it."""
    watch = _Watch(module)
    handles: list[RemovableHandle] = []
    for path, part in module.named_modules():
        if is_operator(part):
            handles.append(part.register_forward_pre_hook(partial(watch.before, path)))
            handles.append(part.register_forward_hook(watch.after))
    for path in blocks:
        block = module.get_submodule(path)
        handles.append(block.register_forward_pre_hook(partial(watch.before_block, path)))
        handles.append(block.register_forward_hook(partial(watch.after_block, path)))
    try:
        with _taking_gradients(module, watch.take_gradient), watch:
            _run(example, samples)
    finally:
        for handle in handles:
            handle.remove()
    return watch


def _run(example: Example, samples: int) -> None:
    loss = example(samples)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise UserError(
            f"example({samples}) gave {type(loss).__name__}, not a loss: it must run the model on that many samples "
            "and return one number that depends on its parameters, such as `lambda n: model(inputs[:n]).mean()`"
        )
    loss.backward()


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """After it buffers and random numbers are as before."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    devices = {parameter.device for parameter in module.parameters() if parameter.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])


@contextmanager
def _taking_gradients(module: nn.Module, take: Callable[[Tensor], None]) -> Iterator[None]:
    """Within it `take` gets each parameter as soon as its gradient is there."""
    hooks = [p.register_post_accumulate_grad_hook(take) for p in module.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """The seconds until the device has done `work`; what was queued before is done when they begin."""
    _synchronise(device)
    start = time.perf_counter()
    work()
    _synchronise(device)
    return time.perf_counter() - start


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
