"""Interpolation of planes, which are needed whole."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..layout.geometry import contiguous_stride
from .halo import whole_planes
from .language import Call, Rule, replicated


def resampled(call: Call) -> Rule:
    """`"n c _ _ -> n c _ _"`"""
    made = call.results[0]
    nearest = "nearest" in call.name and made.dtype is torch.float64
    if nearest and made.stride != contiguous_stride(made.shape):
        return replicated(call)  # how kernels round indices depends on the sizes of a shard
    return whole_planes(call)


def resampled_backward(call: Call) -> Rule:
    """The gradient of an image; the kernel is told the shape of its shard."""
    return replace(resampled(call), shape_arg=call.position("input_size"))
