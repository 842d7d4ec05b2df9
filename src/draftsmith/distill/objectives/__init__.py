"""Training objectives: one file per family."""
