"""Both kernels that take packed weights, on every processor: which one is the best must not decide what is tested."""

import pytest
import torch

from realhf.cpu import products
from realhf.parallel.linear import pack_for_onednn

HAS_OWN = products.pack(torch.zeros(1, 2)) is not None
needs_own = pytest.mark.skipif(not HAS_OWN, reason="a processor without AVX-512 BF16")
PACKERS = [pytest.param(products.pack, id="own", marks=needs_own), pytest.param(pack_for_onednn, id="oneDNN")]
