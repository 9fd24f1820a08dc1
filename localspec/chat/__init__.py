"""`localspec chat`: the conversation (no terminal), its commands, and the screens that show it."""
