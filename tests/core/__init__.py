"""Concepts: layouts, partial values, views and writes, dispatch."""
