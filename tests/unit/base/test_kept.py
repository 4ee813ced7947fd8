from dataclasses import dataclass, replace

from realhf.base.kept import kept


@dataclass(frozen=True)
class Squares:
    factor: int

    @kept
    def of(self, number: int, plus: int = 0) -> list[int]:
        """A multiple of a square."""
        return [self.factor * number**2 + plus]


def test_each_object_keeps_its_results_by_arguments() -> None:
    squares = Squares(2)
    first = squares.of(3)
    assert first == [18]
    assert squares.of(3) is first
    assert (squares.of(4), squares.of(3, plus=1), squares.of(3, 1)) == ([32], [19], [19])
    assert squares.of(3, plus=1) is squares.of(3, plus=1)
    assert squares.of(3) is first
    assert Squares(2).of(3) is not first
    assert replace(squares, factor=1).of(3) == [9]
    assert Squares.of.__doc__ == "A multiple of a square."
