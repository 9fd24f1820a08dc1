"""Training speculators on shards. The only part of the package, with convert, that imports torch."""

import os
from importlib.util import find_spec

from localspec.errors import TrainError

# OpenMP's threads spin while they wait for each other, by default for long: where another process wants a core, a step
# of many small operations then takes ten times as long (docs/LOG.md). Sleeping costs microseconds. It is read once, when
# torch loads OpenMP; a person's own setting wins.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


#: how to install it, wherever localspec comes from
INSTALL = "pip install 'localspec[train]' (in a checkout: pip install '.[train]')"


def need_torch() -> None:
    """Raise TrainError where PyTorch or safetensors are missing."""
    missing = [name for name in ("torch", "safetensors") if find_spec(name) is None]
    if missing:
        raise TrainError(f"training needs {' and '.join(missing)}: {INSTALL}")
