"""One file per drafter; the file's name is its kind. See `base.py` for the contract."""
