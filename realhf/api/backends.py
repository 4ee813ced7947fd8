"""The engine backends that a model can be computed by. This is the one place where they are listed."""

from realhf.architecture.transformers_config import BACKEND as TRANSFORMERS
from realhf.base.errors import UserError
from realhf.base.options import COMPUTATION, Option

NATIVE = "native"

# The name that `ModelSetup.backend` gives -> MODULE:CLASS of the engine's model
# (`realhf.engine.backend.EngineModel`), which is imported on the workers alone.
BACKENDS = {
    NATIVE: "realhf.engine.model:ShardedModel",
    TRANSFORMERS: "realhf.engine.transformers_backend:TransformersModel",
    "megatron": "realhf.engine.megatron_backend:MegatronModel",
}


# A model's field that names one.
BACKEND_OPTION = Option(
    f"what computes the model: {', '.join(BACKENDS)}, or MODULE:CLASS of your own", metavar="NAME", group=COMPUTATION
)


def implementation_of(backend: str) -> str:
    """MODULE:CLASS of a backend: that of a known name, or what was given where it names a class itself.

    Raises:
        UserError: the name is not known.
    """
    if backend not in BACKENDS and ":" not in backend:
        raise UserError(
            f"backend={backend!r} is not known; choose one of {', '.join(BACKENDS)}, or give MODULE:CLASS of your own"
        )
    return BACKENDS.get(backend, backend)
