"""Random numbers that do not depend on the layout: the same on every mesh, in every placement.

`mode("exact")` gives the numbers of plain PyTorch on one device. In `mode("counter")` each rank
draws only the numbers that it holds.
"""

from ..config import random_mode as mode
from ..dispatch.random_ops import register_random
from .agree import begin, manual_seed
from .calls import permuted as permuted
from .calls import random_form

register_random(random_form, begin)

__all__ = ["manual_seed", "mode"]
