"""The verbs of `draftsmith plan`."""
