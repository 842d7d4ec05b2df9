"""The verbs of `draftsmith live`."""
