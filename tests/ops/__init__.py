"""Operators, by page of PyTorch's documentation."""
