"""The CUDA version that the installed torch was built for, found without importing torch."""

import re
from importlib.util import find_spec
from pathlib import Path

# In torch/version.py: `cuda: Optional[str] = None`, or `= '12.8'`.
_CUDA = re.compile(r"""^cuda\b[^=\n]*=\s*['"]([\d.]+)['"]""", re.MULTILINE)


def torch_cuda_version() -> str | None:
    """The CUDA version of the installed torch; None if it was built without CUDA, or torch is missing."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        found = _CUDA.search(Path(spec.origin).with_name("version.py").read_text())
    except OSError:
        return None
    return found[1] if found else None
