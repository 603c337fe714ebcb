"""Changing layouts: `prepare.py` gives the steps of a move, `execute.py` takes them."""
