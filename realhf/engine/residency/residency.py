"""Where a model's parameters are, and which versions of them there are: said here alone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

import torch
from torch import Tensor

from realhf.engine.residency.in_place import Sides, passage_on
from realhf.engine.residency.offload import HostCopy, allocate, free
from realhf.geometry.boxes import Box
from realhf.parallel.views import storage_id
from realhf.realloc.execute.held import by_name, holds, part

PIECE_ELEMENTS = 2**20  # exchanged at a time between two versions

Boxes = list[tuple[Box, Tensor]]  # parts of global parameters, each with a local tensor of its shape


class Where(Enum):
    """The value says why the parameters cannot be used."""

    HERE = ""
    FREED = "the parameters have no memory; `allocate` takes it again, and they have to be written before they are used"
    LENT = "the parameters are in a copy until the call in its layout has ended, and other calls of the model wait"
    OFFLOADED = "the parameters wait in host memory; `load` brings them back before they are used"


class Residency:
    """The life of one rank's parameters: they are on the device, freed, lent to a copy, or offloaded to host memory.

    A backend makes one over the tensors that it computes with; the worker moves the parameters by it. Views, modules
    and graphs that are built on the tensors stay valid: memory goes and comes below them.

    A version of the parameters is a number. Its owner chooses it; here it says how many training steps the values have
    seen. Only the model's own vectors compute: another version is selected by an exchange of values.

    version: the one that computes.
    changes: another number whenever the values that compute may be others.

    Args:
        vectors: all parameters that this rank keeps, each vector with a storage of its own; padding is zero.
        held: lists the boxes of global parameters that this rank keeps, as views of `vectors`.
        versions: the numbers of the versions to be kept; the first one computes.
        states: the optimizer's vectors on the device, which offloading takes along.
        gradient: its values are not kept when the model is offloaded.
        on_leaving: called before the parameters lose their memory.
        on_written: called after the parameters were written from outside.
    """

    def __init__(
        self,
        vectors: Sequence[Tensor],
        held: Callable[[], Boxes],
        *,
        versions: Sequence[int] = (0,),
        states: Sequence[Tensor] = (),
        gradient: Tensor | None = None,
        on_leaving: Callable[[], None] = lambda: None,
        on_written: Callable[[], None] = lambda: None,
    ):
        self._vectors, self._held, self._gradient = [vector.detach() for vector in vectors], held, gradient
        self._on_leaving, self._on_written = on_leaving, on_written
        self._where = Where.HERE
        self._in_copy: Boxes = []  # while they are lent: where they are
        self._sides: Sides | None = None  # while they are lent in place
        self._passage = passage_on(self._vectors[0].device)
        self.version, self.changes = versions[0], 0
        others = [[torch.zeros_like(vector) for vector in self._vectors] for _ in versions[1:]]
        self._kept = dict(zip(versions, [self._vectors, *others], strict=True))
        self._waiting_parameters = HostCopy([vector for of_version in self._kept.values() for vector in of_version])
        self._waiting_states = HostCopy(states)

    @property
    def where(self) -> Where:
        return self._where

    def check_here(self) -> None:
        """To be called before the parameters are used: without memory they would be views of nothing."""
        assert self._where is Where.HERE, self._where.value

    def held(self) -> Boxes:
        """The parameters of this rank, to be read or written in place; fully sharded, a parameter may have several
        boxes here or none. Call `written` after writing."""
        self.check_here()
        return self._held()

    def readable(self, version: int | None = None) -> Boxes:
        """The parameters of this rank, only to be read: of lent ones the views of the copy, of a `version` that does
        not compute those of its own vectors. Raises LookupError where the version is not kept."""
        assert self._where is not Where.OFFLOADED, Where.OFFLOADED.value
        if version is None or version == self.version:
            return self._in_copy if self._where is Where.LENT else self.held()
        kept = dict(zip(map(storage_id, self._vectors), self._of_version(version), strict=True))
        return [
            (box, kept[storage_id(own)].as_strided(own.shape, own.stride(), own.storage_offset()))
            for box, own in self._held()
        ]

    def written(self) -> None:
        """To be called after the parameters were written from outside."""
        self.trained()
        self._on_written()

    def trained(self) -> None:
        """To be called when the model itself changes its parameters and optimizer states."""
        self._waiting_parameters.has_changed = self._waiting_states.has_changed = True
        self.changes += 1

    @property
    def versions(self) -> list[int]:
        """All versions kept, the oldest first."""
        return sorted(self._kept)

    def vectors(self, version: int) -> list[Tensor]:
        """The vectors of a version. Raises LookupError where it is not kept."""
        self.check_here()
        return self._of_version(version)

    def begin_at_version(self, number: int) -> None:
        """The values that compute are version `number` from now on; the version that they replace is gone."""
        is_free = number == self.version or number not in self._kept
        assert is_free, f"version {number} is kept beside {self.version}"
        self._kept[number] = self._kept.pop(self.version)
        self.version = number
        self.changes += 1

    def select_version(self, number: int) -> None:
        """Version `number` computes from now on. Raises LookupError where it is not kept."""
        self.check_here()
        other = self._of_version(number)
        if number == self.version:
            return
        for vector, values in zip(self._vectors, other, strict=True):
            for a, b in zip(vector.split(PIECE_ELEMENTS), values.split(PIECE_ELEMENTS), strict=True):
                before = a.clone()
                a.copy_(b)
                b.copy_(before)
        self._kept[number], self._kept[self.version] = self._vectors, other
        self.version = number
        self.written()

    def fill_versions(self) -> None:
        """Gives all versions the values of the one that computes."""
        self.check_here()
        for vectors in self._kept.values():
            if vectors is not self._vectors:
                for vector, value in zip(vectors, self._vectors, strict=True):
                    vector.copy_(value)

    def free(self) -> None:
        """Gives the memory of the parameters back; gradients and optimizer states stay."""
        self._leave(Where.FREED)
        for vector in self._vectors:
            free(vector)

    def allocate(self) -> None:
        """Takes memory for freed parameters, which must be written through `held` before any use. Parameters that have
        memory keep it."""
        if self._where is Where.FREED:
            for vector in self._vectors:
                allocate(vector)
            self._where = Where.HERE

    def lend_to(self, copy: "Residency", *, in_place: bool = False) -> None:
        """Frees these parameters until `take_back_from`, if `copy` has all of them; else nothing happens.

        So a model is not kept twice while it computes in another layout (HybridFlow, section 5.3). `in_place`: a copy
        that contains them, freed or with arbitrary values, gets them here, and memory as these give theirs back; the
        rest of it is arbitrary then.
        """
        if in_place:
            self._move_into(copy)
            return
        there = by_name(copy.held())
        held = self.held()
        if all(holds(there, box) for box, _ in held):
            self._in_copy = [(box, part(there, box)) for box, _ in held]
            self.free()
            self._where = Where.LENT

    def take_back_from(self, copy: "Residency") -> None:
        """The parameters as they were before `lend_to`, bit by bit, from a copy that did not change them. One that got
        them in place is freed on the way."""
        if self._where is not Where.LENT:
            return
        if self._sides is None:
            for vector in self._vectors:
                allocate(vector)
            for (_, tensor), (_, place) in zip(self._held(), self._in_copy, strict=True):
                tensor.copy_(place)
        else:
            copy._leave(Where.FREED)
            self._passage.take_back(self._sides)
            self._sides = None
        self._where = Where.HERE
        self._in_copy = []
        self._clear_padding()

    def _move_into(self, copy: "Residency") -> None:
        boxes, here = zip(*self.held(), strict=True)

        def places() -> list[Tensor]:
            there = by_name(copy._held())
            return [part(there, box) for box in boxes]

        self._leave(Where.LENT)
        self._sides = Sides(home=self._vectors, copy=copy._vectors, here=here, there=places)
        self._passage.lend(self._sides)
        copy._where = Where.HERE
        self._in_copy = list(zip(boxes, places(), strict=True))

    def _clear_padding(self) -> None:
        """Norms and the optimizer count on zeros there. No more is written than that: parameters are most of it."""
        for vector in self._vectors:
            done = 0
            parts = [tensor for _, tensor in self._held() if storage_id(tensor) == storage_id(vector)]
            for tensor in sorted(parts, key=Tensor.storage_offset):
                assert tensor.is_contiguous(), "padding is what lies between the parameters"
                start = int(tensor.storage_offset())
                vector[done:start].zero_()
                done = start + tensor.numel()
            vector[done:].zero_()

    def offload(self) -> None:
        """Moves parameters, all versions, and optimizer states to host memory until `load`; frees the gradient.

        Values that have not changed since the last time are not copied again.
        """
        if self._where is not Where.OFFLOADED:
            self._leave(Where.OFFLOADED)
        self._waiting_parameters.offload()
        if not self._waiting_states.is_offloaded:
            self._waiting_states.offload()
            if self._gradient is not None:
                free(self._gradient)

    def load(self, *, states: bool = True) -> None:
        """Brings offloaded tensors back; without `states` the parameters alone, and the model cannot train. Tensors on
        the device stay there."""
        if self._where is Where.OFFLOADED:
            self._waiting_parameters.load()
            self._where = Where.HERE
        if states and self._waiting_states.is_offloaded:
            self._waiting_states.load()
            if self._gradient is not None:
                allocate(self._gradient)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Within it all of the model is on the device, wherever it is before and after."""
        was_offloaded = self._where is Where.OFFLOADED
        self.load()
        try:
            yield
        finally:
            if was_offloaded:
                self.offload()

    def _of_version(self, version: int) -> list[Tensor]:
        if version not in self._kept:
            raise LookupError(f"the weights of version {version} are asked for, and here are those of {self.versions}")
        return self._kept[version]

    def _leave(self, where: Where) -> None:
        self.check_here()
        self._on_leaving()
        self._where = where
        self.changes += 1
