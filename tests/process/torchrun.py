"""Scripts on real processes, started as a user would start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_SECONDS = 150
_SETTLED = Path(__file__).parent / "settled.py"


def torchrun(script: Path, count: int, *arguments: str) -> str:
    """What a script prints on `count` processes; an error if it fails, hangs or warns."""
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--standalone", "--nproc-per-node", str(count), str(_SETTLED), str(script)]
    command += arguments
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    settings.pop("PYTHONHASHSEED", None)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_SECONDS, env=settings, check=False
    )
    assert done.returncode == 0, f"{script} on {count} processes:\n{done.stderr}"
    assert not noise(done.stderr), f"{script} on {count} processes:\n{noise(done.stderr)}"
    return done.stdout


def noise(text: str) -> str:
    """What a script said on its error output."""
    return "\n".join(line for line in text.splitlines() if line.strip())
