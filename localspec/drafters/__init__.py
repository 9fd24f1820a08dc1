"""Ways of drafting, one file each, found by name."""
