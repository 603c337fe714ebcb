"""`save_pretrained` of the models of transformers on a mesh: the files of one device, byte by
byte."""

from __future__ import annotations

import contextlib
import io
import tempfile
import traceback
from pathlib import Path
from typing import Any

import shardwise as sw

from .cases import OTHERS, causal_types, make_case
from .compare import said

FILES = "files of "


def with_files() -> list[str]:
    """The models of transformers."""
    others = [name for name in OTHERS if not name.startswith(("timm", "diffusers"))]
    return [*others, *causal_types()]


def check_files(name: str) -> dict[str, Any]:
    """The verdict on the files of a model. What one device cannot save is not counted."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        try:
            case = make_case(name.removeprefix(FILES))
            case.model.save_pretrained(f"{folder}/alone")
        except Exception as error:
            return {"verdict": "not on one device", "why": said(error)}
        mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        try:
            sw.shard_module(case.model, mesh, case.plan)
            case.model.save_pretrained(f"{folder}/mesh")
        except Exception as error:
            trace = traceback.format_exc()[-4000:]
            return {"verdict": "error", "why": said(error), "trace": trace}
        alone, found = (_contents(Path(folder) / each) for each in ("alone", "mesh"))
    differ = sorted(n for n in alone.keys() | found.keys() if alone.get(n) != found.get(n))
    return {"verdict": "wrong" if differ else "right", "why": ", ".join(differ)}


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
