"""Training speculators on shards. The only part of the package, with convert, that imports torch."""
