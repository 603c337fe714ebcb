"""Settings for every test process."""

from __future__ import annotations

import torch

torch.set_num_threads(1)  # tensors are tiny, and test processes share the cores
