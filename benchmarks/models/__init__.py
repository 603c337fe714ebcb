"""Models for `benchmarks/programs.py`, as people write them for one device.

Nothing here knows of meshes: a layout is given from outside, by the names of parameters and inputs.
"""
