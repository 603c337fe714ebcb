"""Concepts: layouts, partial values, views and writes, redistribution, dispatch, saving."""
