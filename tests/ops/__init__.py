"""Operators, by page of the documentation of torch."""
