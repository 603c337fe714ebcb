"""`load_checkpoint` and `load_safetensors`: every rank reads its parts, and only those."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import CheckpointError, public
from ...tensor.checkpoint import chunks, local_part
from ...tensor.dtensor import DTensor
from ..in_place import set_device
from .format import Stored, read_header, read_part
from .save import REST
from .state import flatten, unique_names
from .together import Together

_PARTLY = "Some tensors may have been loaded: load again before you go on."
_SHOWN = 5  # names of a problem


@public
def load_safetensors(
    model: Any, paths: str | Path | Iterable[str | Path], *, strict: bool = True
) -> None:
    """Load a model, or a dict of tensors, from safetensors files, in place.

    `paths` is a folder with `model.safetensors` or an index, a file, or several files. All ranks
    call it; each reads only the bytes of its own parts. Names and shapes must fit, and are checked
    before anything is changed; with `strict=False` names may be missing or unknown. Values are
    converted between floating dtypes, as `load_state_dict` does. Sharded parameters on the meta
    device get memory for their parts.
    """
    tensors, _ = flatten(model)
    together = Together("load_safetensors", tensors.values(), plain_alone=True)
    with together.step("Nothing was changed."):
        stored = _found(paths, "model")
        wanted = _matched(tensors, stored, strict)
    with together.step(_PARTLY):
        _read(wanted)


@public
def load_checkpoint(state: dict[str, Any], folder: str | Path) -> None:
    """Load what `save_checkpoint` has written into the same kind of dict, in place.

    The mesh and the layouts may be others. Models must have the same names and shapes; optimizers
    need no state yet. Names of the checkpoint that the dict does not have are left out, so
    `{"model": model}` loads a model alone.
    """
    if not isinstance(state, dict):
        raise CheckpointError(
            f"load_checkpoint: a dict is needed, but got {type(state).__name__}. Write "
            '{"model": model, "optimizer": optimizer}, as it was saved.'
        )
    together = Together("load_checkpoint", flatten(state)[0].values(), plain_alone=True)
    with together.step("Nothing was changed."):
        stored = _found(folder, "checkpoint")
        rest = _unpacked(stored)
        wanted: list[_Wanted] = []
        loaded: dict[str, torch.Tensor] = {}
        for name, live in state.items():
            _check_keys(live, rest, name)
            below = {key: each for key, each in stored.items() if _is_below(key, name)}
            if isinstance(live, nn.Module) or not hasattr(live, "load_state_dict"):
                targets, _ = flatten({name: live})
            else:
                _check_groups(name, live, rest[name])
                targets = {key: _made(live, key, name, each) for key, each in below.items()}
            loaded |= targets
            wanted += _matched(targets, below, strict=True)
    with together.step(_PARTLY):
        _read(wanted)
        for name, live in state.items():
            state[name] = _restored(live, rest[name], name, loaded)


def _is_below(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def _check_keys(live: Any, rest: Any, key: Any) -> None:
    """An error if a checkpoint lacks a key of a dict, at any depth."""
    if not isinstance(rest, dict) or key not in rest:
        have = f", but {list(rest)}" if isinstance(rest, dict) else ""
        raise CheckpointError(f"the checkpoint has no {key!r}{have}.")
    for below in live if isinstance(live, dict) else ():
        _check_keys(live[below], rest[key], below)


# --- files ---------------------------------------------------------------------------------------


def _found(paths: str | Path | Iterable[str | Path], stem: str) -> dict[str, Stored]:
    """The tensors of files, by name."""
    given = [Path(paths)] if isinstance(paths, str | Path) else list(map(Path, paths))
    found: dict[str, Stored] = {}
    for file in [file for path in given for file in _files_of(path, stem)]:
        header = read_header(file)
        twice = sorted(found.keys() & header.keys())
        if twice:
            raise CheckpointError(f"{twice[0]} is in {found[twice[0]].file} and in {file}.")
        found |= header
    return found


def _files_of(path: Path, stem: str) -> list[Path]:
    if path.is_dir():
        single, index = path / f"{stem}.safetensors", path / f"{stem}.safetensors.index.json"
        if single.exists():
            return [single]
        if not index.exists():
            raise CheckpointError(f"{path} has no {single.name} and no {index.name}.")
        path = index
    if path.suffix != ".json":
        return [path]
    try:
        weights = json.loads(path.read_text())["weight_map"]
        return [path.parent / name for name in dict.fromkeys(weights.values())]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: it is no index of safetensors.") from error


def _unpacked(stored: dict[str, Stored]) -> dict[str, Any]:
    """The values of a checkpoint that are no tensors."""
    packed = stored.pop(REST, None)
    if packed is None:
        raise CheckpointError("the file was not written by save_checkpoint. Use load_safetensors.")
    with packed.file.open("rb") as file:
        file.seek(packed.start)
        data = file.read(packed.nbytes)
    rest: dict[str, Any] = torch.load(io.BytesIO(data))
    return rest


# --- checks before anything is changed -----------------------------------------------------------


@dataclass(frozen=True)
class _Wanted:
    """A tensor, and what it is read from."""

    name: str
    tensor: torch.Tensor
    stored: Stored


def _matched(
    tensors: Mapping[str, torch.Tensor], stored: Mapping[str, Stored], strict: bool
) -> list[_Wanted]:
    """Each tensor once, with what it is read from; an error that lists all that does not fit."""
    sources: dict[str, str] = {}
    names = unique_names(dict(tensors))
    for name, first in names.items():
        if name in stored:
            sources.setdefault(first, name)
    missing = [name for name, first in names.items() if name == first and name not in sources]
    unknown = [name for name in stored if name not in tensors]
    problems = []
    if strict and missing:
        problems.append(f"the file lacks {_listed(missing)}")
    if strict and unknown:
        problems.append(f"the file has {_listed(unknown)}, which the state lacks")
    wanted = [_Wanted(first, tensors[first], stored[name]) for first, name in sources.items()]
    problems += filter(None, map(_misfit, wanted))
    if problems:
        raise CheckpointError("the files do not fit. " + "; ".join(problems) + ".")
    for each in wanted:
        if isinstance(each.tensor, DTensor):
            each.tensor.__create_chunk_list__()  # an error for a Partial or a deferred view
    return wanted


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _misfit(wanted: _Wanted) -> str | None:
    have, want = wanted.stored, wanted.tensor
    if want.is_meta and not isinstance(want, DTensor):
        return f"{wanted.name} is on the meta device. Call shard_module first, or to_empty()"
    if have.shape != tuple(want.shape):
        return f"{wanted.name} is {list(have.shape)} in the file and {list(want.shape)} here"
    floats = have.dtype.is_floating_point and want.dtype.is_floating_point
    if have.dtype is not want.dtype and not floats:
        return f"{wanted.name} is {have.dtype} in the file and {want.dtype} here"
    return None


# --- reading -------------------------------------------------------------------------------------


def _read(wanted: Iterable[_Wanted]) -> None:
    with ExitStack() as stack, torch.no_grad():
        opened: dict[Path, int] = {}
        for each in wanted:
            path, tensor, stored = each.stored.file, each.tensor, each.stored
            if tensor.is_meta and isinstance(tensor, DTensor):
                set_device(tensor, tensor._spec.topology.device_type)
                tensor.__create_chunk_list__()  # a user has the new memory, too
            if path not in opened:
                opened[path] = os.open(path, os.O_RDONLY)
                stack.callback(os.close, opened[path])
            if not isinstance(tensor, DTensor):
                tensor.copy_(read_part(opened[path], stored, (0,) * tensor.ndim, tensor.shape))
                continue
            for chunk in chunks(tensor._spec):
                value = read_part(opened[path], stored, chunk.offset, chunk.size)
                local_part(tensor, chunk).copy_(value)


# --- optimizers and other objects with a state ---------------------------------------------------


def _check_groups(name: str, live: Any, rest: Any) -> None:
    """An error if an optimizer has other parameters than the one that was saved."""
    if not isinstance(live, torch.optim.Optimizer):
        return
    have = [len(group["params"]) for group in rest["param_groups"]]
    want = [len(group["params"]) for group in live.param_groups]
    if have != want:
        raise CheckpointError(
            f"the optimizer {name!r} has groups of {want} parameters, the checkpoint has {have}."
        )


def _made(live: Any, key: str, name: str, stored: Stored) -> torch.Tensor:
    """A tensor for a value of an object's state: laid out as its parameter if it has its shape."""
    if isinstance(live, torch.optim.Optimizer):
        parameters = [each for group in live.param_groups for each in group["params"]]
        kind, index, *_ = [*key.removeprefix(f"{name}.").split("."), ""]
        if kind == "state" and index.isdigit() and int(index) < len(parameters):
            like = parameters[int(index)]
            if tuple(like.shape) == stored.shape:
                return torch.empty_like(like.detach(), dtype=stored.dtype)
    return torch.empty(stored.shape, dtype=stored.dtype)


def _restored(live: Any, rest: Any, path: str, loaded: Mapping[str, torch.Tensor]) -> Any:
    """A value of the dict after loading; modules and tensors are loaded in place already."""
    if isinstance(live, nn.Module):
        extra = {key: value for key, value in rest.items() if value is not None}
        if extra:
            live.load_state_dict(extra, strict=False)
        return live
    if hasattr(live, "load_state_dict"):
        live.load_state_dict(_filled(rest, path, loaded))
        return live
    if isinstance(live, dict) and isinstance(rest, dict):
        for key in live:
            live[key] = _restored(live[key], rest[key], f"{path}.{key}", loaded)
        return live
    return live if isinstance(live, torch.Tensor) else _filled(rest, path, loaded)


def _filled(rest: Any, path: str, loaded: Mapping[str, torch.Tensor]) -> Any:
    """A saved value with its tensors."""
    if isinstance(rest, dict):
        return {key: _filled(value, f"{path}.{key}", loaded) for key, value in rest.items()}
    if isinstance(rest, list | tuple):
        items = [_filled(value, f"{path}.{index}", loaded) for index, value in enumerate(rest)]
        return tuple(items) if isinstance(rest, tuple) else items
    return loaded.get(path, rest)
