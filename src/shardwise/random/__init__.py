"""Random numbers that do not depend on the layout: the same on every mesh, in every placement.

`mode("exact")` gives the numbers of plain PyTorch on one device; in `mode("counter")` each rank
makes only what it holds.
"""

from ..config import random_mode as mode
from ..dispatch.random_ops import register_random
from .agree import manual_seed
from .calls import random_form
from .permute import permuted

register_random(random_form, permuted)

__all__ = ["manual_seed", "mode", "permuted"]
