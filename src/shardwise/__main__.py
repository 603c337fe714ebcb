"""The command line: `shardwise calibrate`, or `python -m shardwise calibrate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from . import __version__
from .errors import MeshError
from .tools.calibrate import calibrate


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(prog="shardwise", description="Tools for Shardwise meshes.")
    parser.add_argument("--version", action="version", version=f"shardwise {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "calibrate",
        help="measure latency and bandwidth of each axis of a mesh, for the planner",
        description="Measure latency and bandwidth of each axis of a mesh and write them to a file "
        "for init_device_mesh(links=). Run it under torchrun, as the program will run.",
    )
    command.add_argument("--mesh", required=True, type=_shape, help="the shape, such as 2,4")
    command.add_argument("--device", default="cpu", help="the device type (cpu)")
    command.add_argument("--file", type=Path, default=Path("links.json"), help="(links.json)")
    given = parser.parse_args(arguments)
    try:
        links = calibrate(given.device, given.mesh, given.file)
    except MeshError as error:
        parser.error(str(error))
    if dist.get_rank() == 0:
        for axis, link in enumerate(links):
            rate = f"{link.bandwidth / 1e9:.3f} GB/s"
            print(f"axis {axis}: {link.latency * 1e6:.1f} us, {rate}", flush=True)
        print(f"written to {given.file}", flush=True)
    dist.destroy_process_group()


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(size) for size in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: write sizes such as 2,4")
    return shape


if __name__ == "__main__":
    main()
