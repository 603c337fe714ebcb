"""Random numbers that do not depend on the layout: the same on every mesh, in every placement.

`mode("exact")` gives the numbers of plain PyTorch on one device; in `mode("counter")` each rank
makes only what it holds.
"""

from ..config import random_mode as mode
from .agree import manual_seed
from .calls import is_random, is_without_dropout, random_form
from .shuffle import permuted

__all__ = ["is_random", "is_without_dropout", "manual_seed", "mode", "permuted", "random_form"]
