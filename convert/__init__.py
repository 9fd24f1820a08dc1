"""Export to GGUF: one file per artefact. Installed as ``localspec.convert``."""
