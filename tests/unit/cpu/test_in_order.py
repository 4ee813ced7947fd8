"""What a worker refuses by itself, wherever it runs."""

import pytest

from realhf.base.errors import UserError
from realhf.cpu import in_order
from realhf.cpu.in_order import check_in_order


def test_what_cannot_compute_in_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_order, "has_kernels", lambda: True)
    check_in_order(1)
    with pytest.raises(UserError, match=r"with 2 threads in a worker: .* set OMP_NUM_THREADS=1"):
        check_in_order(2)
    monkeypatch.setattr(in_order, "has_kernels", lambda: False)
    with pytest.raises(UserError, match=r"without its C\+\+ kernels, .*; leave reproducible='layout' out, or install"):
        check_in_order(1)
    check_in_order(1, is_here=False)
