"""`save_checkpoint` and `save_safetensors`: every rank writes its parts into ordinary files.

The layouts say which rank writes which bytes, so nothing is gathered. New files get names that no
complete checkpoint uses; one rename, the last thing that happens, puts them in its place.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from ...dispatch.views import DeferredView
from ...errors import CheckpointError, need, public
from ...layout.geometry import flat_index
from ...layout.spec import DTensorSpec
from ...storage.operands import in_layout
from ...tensor.checkpoint import chunks
from ...tensor.dtensor import DTensor
from .format import Stored, dtype_name, make_header, write_part
from .state import flatten, unique_names
from .together import Together

REST = "__rest__"
"""The name of the bytes that hold all of a state that is no tensor."""
_FILE = 5 * 10**9  # bytes of a file, as Hugging Face's were
Part = tuple[Sequence[int], torch.Tensor]
"""Where a box of a tensor starts, and its values."""


@public
def save_checkpoint(state: Mapping[str, Any], folder: str | Path) -> None:
    """Save a dict of models, optimizers, tensors and other values, in `checkpoint.safetensors`
    (above 5 GB in several files with an index).

    All ranks call it, and each writes its own parts. A checkpoint that is in the folder already is
    replaced at the very end, in one step: whenever a program is killed, the folder has the old one
    or the new one.

    >>> import tempfile, torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> model = shardwise.distribute_module(torch.nn.Linear(4, 2), mesh)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> state = {"model": model, "optimizer": optimizer, "step": 7}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     shardwise.save_checkpoint(state, folder)
    ...     state["step"] = 0
    ...     shardwise.load_checkpoint(state, folder)
    >>> state["step"]
    7
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"save_checkpoint: a dict is needed, but got {type(state).__name__}. Give a name to "
            'each: {"model": model, "optimizer": optimizer, "step": step}.'
        )
    _check_folder("save_checkpoint", folder)
    _save("save_checkpoint", "checkpoint", state, Path(folder), _FILE)


@public
def save_safetensors(model: Any, folder: str | Path, *, max_file_size: int = _FILE) -> None:
    """Save a model, or a dict of tensors, as the `model.safetensors` that other programs read.

    All ranks call it, and each writes its own parts. Above `max_file_size` bytes there are several
    files and an index, as Hugging Face writes them. A tied parameter is saved once, under its first
    name.

    >>> import tempfile, torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> model = shardwise.distribute_module(torch.nn.Linear(4, 2), mesh)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     shardwise.save_safetensors(model, folder)
    ...     shardwise.load_safetensors(model, folder)
    """
    _check_folder("save_safetensors", folder)
    need(
        "save_safetensors",
        max_file_size,
        int,
        "max_file_size as a number of bytes",
        CheckpointError,
    )
    _save("save_safetensors", "model", model, Path(folder), max_file_size)


def _check_folder(what: str, folder: object) -> None:
    need(what, folder, str | os.PathLike, "the path of a folder", CheckpointError)


def _save(what: str, stem: str, state: Any, folder: Path, most: int) -> None:
    tensors, rest = flatten(state)
    together = Together(what, tensors.values())
    names = unique_names(tensors)
    number, packed = 0, b""
    with together.step("Nothing was written."):
        _check_dtypes(tensors)
        if stem == "checkpoint":
            packed = _packed(rest)
        if together.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            number = _next_number(folder, stem)
    number, size = together.told_by_first([number, len(packed)])
    stored = {
        name: Stored(folder, tensors[name].dtype, tuple(tensors[name].shape))
        for name in dict.fromkeys(names.values())
    }
    if stem == "checkpoint":
        stored[REST] = Stored(folder, torch.uint8, (size,))
    tied = {name: first for name, first in names.items() if name != first}
    files = _files(stored, folder, stem, number, most, {"format": "pt"} | tied)
    together.check_same(f"{stem} {number} {names} {[_described(t) for t in tensors.values()]}")
    parts = _parts(tensors, names, together.is_first)
    if stem == "checkpoint" and together.is_first:
        parts[REST] = [((0,), torch.frombuffer(bytearray(packed), dtype=torch.uint8))]
    kept = f"What {folder} had before is still there."
    with together.step(kept):
        for each in files if together.is_first else ():
            _create(each)
    with together.step(kept):
        for each in files:
            _write(each, parts)
    with together.step(kept):
        if together.is_first:
            _commit(folder, stem, files)


def _check_dtypes(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, each in tensors.items():
        if dtype_name(each.dtype) is None:
            raise CheckpointError(
                f"{name} is {each.dtype}, which safetensors files do not have. Convert it, or use "
                "torch.distributed.checkpoint."
            )
        if each.layout is not torch.strided or each.is_meta:
            raise CheckpointError(f"{name} is sparse or on the meta device. Save dense values.")


def _packed(rest: Any) -> bytes:
    """All that is no tensor, checked to be what `torch.load` reads by default."""
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()))
    except Exception as error:
        raise CheckpointError(
            "the state has values that torch.load does not read by default. Save numbers, strings, "
            f"lists and dicts: {str(error).splitlines()[0]}"
        ) from error
    return buffer.getvalue()


def _described(tensor: torch.Tensor) -> str:
    return str(tensor._spec if isinstance(tensor, DTensor) else (tensor.dtype, tensor.shape))


# --- what each rank writes -----------------------------------------------------------------------


def _parts(
    tensors: Mapping[str, torch.Tensor], names: Mapping[str, str], is_first: bool
) -> dict[str, list[Part]]:
    """The boxes that this process writes. Replicas take turns; plain tensors are the first rank's.
    A Partial is reduced here, by all ranks."""
    found: dict[str, list[Part]] = {}
    for turn, name in enumerate(dict.fromkeys(names.values())):
        tensor = tensors[name]
        if not isinstance(tensor, DTensor):
            found[name] = [((0,) * tensor.ndim, tensor)] if is_first else []
            continue
        spec = tensor._spec
        moves = bool(spec.sums) or isinstance(tensor, DeferredView)
        local = in_layout(tensor, spec.reduced) if moves else tensor._locals
        mine = _is_writer(spec.reduced, turn)
        found[name] = []
        for chunk in chunks(spec) if mine else []:
            box = zip(chunk.local_offset, chunk.size, strict=True)
            part = local[chunk.slot][tuple([slice(start, start + n) for start, n in box])]
            found[name].append((chunk.offset, part))
    return found


def _is_writer(spec: DTensorSpec, turn: int) -> bool:
    """True on one of the ranks that hold the same part."""
    mesh = spec.topology
    if mesh.virtual or mesh.coordinate is None:
        return mesh.virtual
    same = [axis for axis in range(mesh.ndim) if axis not in spec.slot_axes]
    count = prod(mesh.shape[axis] for axis in same)
    return flat_index(mesh.coordinate, mesh.shape, same) == turn % count


# --- files ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _File:
    path: Path
    header: bytes
    tensors: dict[str, Stored]

    @property
    def size(self) -> int:
        return len(self.header) + sum(each.nbytes for each in self.tensors.values())


def _files(
    stored: Mapping[str, Stored],
    folder: Path,
    stem: str,
    number: int,
    most: int,
    metadata: Mapping[str, str],
) -> list[_File]:
    """The tensors in files of at most `most` bytes, if a tensor is not larger itself."""
    groups: list[dict[str, Stored]] = [{}]
    room = most
    for name, each in stored.items():
        if groups[-1] and each.nbytes > room:
            groups.append({})
            room = most
        groups[-1][name] = each
        room -= each.nbytes
    prefix = f"{stem}-{number}" if number else stem
    files = []
    for index, group in enumerate(groups, 1):
        path = folder / f"{prefix}-{index:05}-of-{len(groups):05}.safetensors"
        if len(groups) == 1:
            path = folder / f"{stem}-{number}.partial"
        files.append(_File(path, *make_header(path, group, metadata)))
    return files


def _create(file: _File) -> None:
    """A file of the right size with its header, into which all ranks write."""
    opened = os.open(file.path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        os.ftruncate(opened, file.size)
        os.pwrite(opened, file.header, 0)
        os.fsync(opened)
    finally:
        os.close(opened)


def _write(file: _File, parts: Mapping[str, Sequence[Part]]) -> None:
    """The parts of this process, in a file that the first rank has made."""
    if not any(parts[name] for name in file.tensors):
        return
    if not file.path.exists() or file.path.stat().st_size != file.size:
        raise CheckpointError(
            f"{file.path}, which the first rank has made, is not there for this one. All ranks "
            "must give one folder, on a file system that all of them see."
        )
    opened = os.open(file.path, os.O_RDWR)
    try:
        for name, stored in file.tensors.items():
            for offset, part in parts.get(name, ()):
                write_part(opened, stored, offset, part)
        os.fsync(opened)
    finally:
        os.close(opened)


def _commit(folder: Path, stem: str, files: Sequence[_File]) -> None:
    """Make the new files the checkpoint of the folder, and remove those of the one before."""
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if len(files) == 1:
        os.replace(files[0].path, single)
        old = [index]
    else:
        weights = {name: file.path.name for file in files for name in file.tensors}
        total = sum(each.nbytes for file in files for each in file.tensors.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=2)
        temporary = folder / f"{stem}-0.partial"
        with temporary.open("w") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(temporary, index)
        old = [single]
    new = {file.path for file in files}
    for path in [*old, *[path for path in _of_stem(folder, stem) if path not in new]]:
        path.unlink(missing_ok=True)


def _of_stem(folder: Path, stem: str) -> dict[Path, int]:
    """The numbered files that a save has made or left, with their numbers."""
    pattern = re.compile(rf"{stem}(?:-(\d+))?(?:-\d{{5}}-of-\d{{5}}\.safetensors|\.partial)")
    found = {path: pattern.fullmatch(path.name) for path in folder.iterdir()}
    return {path: int(match[1] or 0) for path, match in found.items() if match}


def _next_number(folder: Path, stem: str) -> int:
    return max(_of_stem(folder, stem).values(), default=-1) + 1
