"""Shardwise: a distributed tensor for PyTorch."""
from .placement import *
from .mesh import init_device_mesh
