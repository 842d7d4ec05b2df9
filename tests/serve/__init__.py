"""The live server and its page."""
