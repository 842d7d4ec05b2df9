"""Targets: what can be asked for the law of the next token."""
