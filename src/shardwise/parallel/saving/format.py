"""The safetensors format: a JSON header, then the bytes of each tensor in row-major order.

Where each byte of a tensor lies follows from shapes and dtypes alone. So ranks write their parts
into one file, and read them from it, without asking each other.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

import torch

from ...errors import CheckpointError
from ...layout.geometry import contiguous_stride

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MOST = 1 << 30  # bytes of one call of the operating system, which takes at most 2 GiB


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, and where its bytes start."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def dtype_name(dtype: torch.dtype) -> str | None:
    """The name of a dtype in a header; None if the format has none."""
    return _NAMES.get(dtype)


def make_header(
    file: Path, tensors: Mapping[str, Stored], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Stored]]:
    """The first bytes of a file with these tensors, and where each tensor is in it."""
    # Wide dtypes first, so that every tensor is aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    described: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    ends, end = {}, 0
    for name in order:
        each = tensors[name]
        start, end = end, end + each.nbytes
        ends[name] = start
        described[name] = {
            "dtype": _NAMES[each.dtype],
            "shape": list(each.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    placed = {
        name: Stored(file, tensors[name].dtype, tensors[name].shape, len(header) + ends[name])
        for name in order
    }
    return header, placed


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of a file; an error if the file is damaged or shorter than it should be."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            count = int.from_bytes(opened.read(8), "little")
            text = opened.read(count) if count < size else b""
        if size < 8 or len(text) < count:
            raise CheckpointError(f"{file} is truncated, or no safetensors file: {size} bytes.")
        described = json.loads(text)
        described.pop("__metadata__", None)
        found = {name: _stored(file, 8 + count, each) for name, each in described.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is no safetensors file: its header is damaged.") from error
    end = max([each.start + each.nbytes for each in found.values()], default=0)
    if end > size:
        raise CheckpointError(f"{file} is truncated: it has {size} bytes of {end}.")
    return found


def _stored(file: Path, data: int, described: dict[str, list[int] | str]) -> Stored:
    start, end = map(int, described["data_offsets"])
    shape = tuple(map(int, described["shape"]))
    made = Stored(file, _DTYPES[str(described["dtype"])], shape, data + start)
    if made.nbytes != end - start or start < 0 or any(size < 0 for size in shape):
        raise ValueError("the offsets of a tensor do not fit its shape")
    return made


# --- parts of tensors ----------------------------------------------------------------------------


def write_part(file: int, stored: Stored, offset: Sequence[int], part: torch.Tensor) -> None:
    """Write a box of a tensor, which starts at `offset`, into an open file."""
    value = part.detach().resolve_conj().resolve_neg().cpu().contiguous()
    memory = _memory(value)
    for place, inside, count in _runs(stored, offset, tuple(value.shape)):
        done = 0
        while done < count:
            piece = memory[inside + done : inside + min(count, done + _MOST)]
            done += os.pwrite(file, piece, place + done)


def read_part(
    file: int, stored: Stored, offset: Sequence[int], shape: Sequence[int]
) -> torch.Tensor:
    """Read a box of a tensor from an open file: only the bytes of the box."""
    value = torch.empty(tuple(shape), dtype=stored.dtype)
    memory = _memory(value)
    for place, inside, count in _runs(stored, offset, shape):
        done = 0
        while done < count:
            piece = memory[inside + done : inside + min(count, done + _MOST)]
            got = os.preadv(file, [piece], place + done)
            if not got:
                raise CheckpointError(f"{stored.file} ended while it was read.")
            done += got
    return value


def _runs(
    stored: Stored, offset: Sequence[int], shape: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """The bytes of a box that lie together: their place in the file, in the box, their number."""
    if not prod(shape):
        return
    width, stride = stored.dtype.itemsize, contiguous_stride(stored.shape)
    whole = len(shape)  # dims from here on are in the box as a whole
    while whole and shape[whole - 1] == stored.shape[whole - 1]:
        whole -= 1
    count = prod(shape[max(whole - 1, 0) :]) * width
    outer = [range(a, a + n) for a, n in zip(offset, shape, strict=True)][: max(whole - 1, 0)]
    first = offset[whole - 1] * stride[whole - 1] if whole else 0
    for number, index in enumerate(product(*outer)):
        place = first + sum(i * step for i, step in zip(index, stride, strict=False))
        yield stored.start + place * width, number * count, count


def _memory(value: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    if not value.numel():
        return memoryview(b"")
    nbytes = value.numel() * value.itemsize
    return memoryview((ctypes.c_char * nbytes).from_address(value.data_ptr())).cast("B")
