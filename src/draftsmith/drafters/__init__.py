"""One file per drafter; the file's name is its kind. See `_base.py` for the contract."""
