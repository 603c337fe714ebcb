"""What a call returns: shapes, strides and dtypes, from PyTorch's own kernels on meta tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import nan
from typing import Any

import torch

from ..layout.spec import DTensorSpec, TensorMeta
from .cache import kept
from .meta_fixes import OWN_SHAPES, STRICT, Unknown, as_on_devices
from .plans import Fixed, filled
from .refusals import CHECKS, as_kernels_raise

__all__ = ["Unknown", "infer"]

Structure = int | None | tuple[int | Fixed | None, ...]
Results = tuple[tuple[TensorMeta, ...], Structure]

_known: dict[tuple[Any, ...], Results] = {}
"""What calls return depends on no layout: in another one nothing is asked again."""

_DYNAMIC = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def infer(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], specs: Sequence[DTensorSpec]
) -> Results:
    """The metas of the results, and how they are returned: alone, as a tuple, or not at all.

    Errors in shapes and dtypes are PyTorch's own, and come before anything is moved.
    """
    on_cpu = bool(specs) and specs[0].topology.device_type == "cpu"
    metas = tuple([spec.meta for spec in specs])
    given = (_hashable(args), _hashable(kwargs.values()), *kwargs)
    key = (op, on_cpu, torch.get_default_dtype(), metas, given)
    found = _known.get(key)
    if found is None:
        found = _infer(op, args, kwargs, metas, on_cpu)
        kept.put(_known, key, found, 600 + 300 * len(metas))
    return found


def _hashable(values: Iterable[Any]) -> tuple[Any, ...]:
    """Arguments as part of a key: of tensors only that they are there."""
    return tuple(
        [
            torch.Tensor
            if isinstance(value, torch.Tensor)
            else _hashable(value)
            if isinstance(value, (list, tuple))
            # 1, 1.0 and True are equal, but not the same; no NaN is equal to another
            else (type(value), value if value == value else nan)
            for value in values
        ]
    )


def _infer(
    op: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    metas: Sequence[TensorMeta],
    on_cpu: bool,
) -> Results:
    own = OWN_SHAPES.get(op._schema.name) if on_cpu else None
    dynamic = any(tag in op.tags for tag in _DYNAMIC) and not _by_integers(op, args)
    if own is None and dynamic:
        raise Unknown
    tensors = [
        torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        for shape, stride, dtype in metas
    ]
    given, named = filled(args, kwargs, iter(tensors))
    if named.get("device") is not None:
        named["device"] = torch.device("meta")
    name = op._schema.name.removeprefix("aten::")
    if name == "nansum" and len(given) > 1 and given[1] == []:
        given[1] = None  # the meta kernel takes no dims for none; the others take all
    reduces = name.endswith("_loss_backward") and op._schema.arguments[3].name == "reduction"
    if reduces and not given[1].numel():
        given[3] = 0  # means divide by the number of elements; the result is as large without
    if name == "linalg_vector_norm" and len(given) > 1 and not given[0].numel():
        given[1] = 2  # the meta kernel refuses other norms even where there are none to take
    check = CHECKS.get(name.removesuffix("_"))
    if check is not None:
        check(*given, **named)
    # Meta kernels of other libraries may refuse what their kernels take, in words of their own.
    is_foreign = op.namespace not in ("aten", "prims")
    try:
        made = (own or op)(*given, **named)
    except (NotImplementedError, ZeroDivisionError) as error:  # losses divide by numel()
        raise Unknown from error
    except (RuntimeError, ValueError, AssertionError) as error:
        if name in STRICT and isinstance(error, RuntimeError):
            raise Unknown from error
        if is_foreign:
            raise Unknown from error
        raise as_kernels_raise(name, error) from None
    except Exception as error:
        if is_foreign:
            raise Unknown from error
        raise
    return _listed(as_on_devices(op, given, made))


def _by_integers(op: Any, args: Sequence[Any]) -> bool:
    """Whether this is indexing without a mask: only masks give shapes that depend on values."""
    return op._schema.name == "aten::index" and not any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )


def _listed(made: Any) -> Results:
    if isinstance(made, torch.Tensor):
        return (meta_of(made),), 0
    if made is None:
        return (), None
    if not isinstance(made, (list, tuple)):
        raise Unknown
    metas: list[TensorMeta] = []
    places: list[int | Fixed | None] = []
    for value in made:
        if isinstance(value, torch.Tensor):
            places.append(len(metas))
            metas.append(meta_of(value))
        elif value is None:
            places.append(None)
        elif isinstance(value, (int, float)):
            places.append(Fixed(value))
        else:
            raise Unknown
    return tuple(metas), tuple(places)


def meta_of(value: torch.Tensor) -> TensorMeta:
    """Shape, stride and dtype of a tensor."""
    return TensorMeta(tuple(value.shape), tuple(value.stride()), value.dtype)
