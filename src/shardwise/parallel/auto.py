"""`plan="auto"`: rules that a model brings with it, or that its linear layers suggest."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..layout.mesh import Topology


def automatic_rules(model: nn.Module, mesh: Topology) -> dict[Any, Any]:
    raise NotImplementedError('plan="auto" is on its way: give a dict')
