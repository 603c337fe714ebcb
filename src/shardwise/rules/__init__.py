"""Rules: what layouts an operator may run in on one mesh axis. `table.py` has one line for each."""
