"""Training data: what the target answers, and what it thinks while it does. numpy only, no torch."""
