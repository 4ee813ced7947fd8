"""Both kernels that take packed weights, on every processor: which one is the best must not decide what is tested."""

import pytest

from realhf.cpu import products
from realhf.parallel.linear import pack_for_onednn

PACKERS = [pytest.param(products.pack, id="own"), pytest.param(pack_for_onednn, id="oneDNN")]
