"""Training speculators on shards. The only part of the package, with convert, that imports torch."""

import os

# OpenMP's threads spin while they wait for each other, by default for long: where another process wants a core, a step
# of many small operations then takes ten times as long (docs/LOG.md). Sleeping costs microseconds. It is read once, when
# torch loads OpenMP; a person's own setting wins.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
