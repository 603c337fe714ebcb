"""Captured steps: a step is recorded below the wrapper and then replayed without it."""
