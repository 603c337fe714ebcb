"""The command line: `shardwise calibrate` and `shardwise explain`; or `python -m shardwise`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from . import __version__
from .errors import ShardwiseError
from .report.script import explain_script
from .tools.calibrate import calibrate


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(prog="shardwise", description="Tools for Shardwise programs.")
    parser.add_argument("--version", action="version", version=f"shardwise {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_calibrate(commands)
    _add_explain(commands)
    given = parser.parse_args(arguments)
    try:
        _calibrate(given) if given.command == "calibrate" else _explain(given)
    except ShardwiseError as error:
        parser.error(str(error))


def _add_calibrate(commands: Any) -> None:
    command = commands.add_parser(
        "calibrate",
        help="measure latency and bandwidth of each axis of a mesh, for the planner",
        description="Measure latency and bandwidth of each axis of a mesh and write them to a file "
        "for init_device_mesh(links=). Run it under torchrun, as the program will run.",
    )
    command.add_argument("--mesh", required=True, type=_shape, help="the shape, such as 2,4")
    command.add_argument("--device", default="cpu", help="the device type (cpu)")
    command.add_argument("--file", type=Path, default=Path("links.json"), help="(links.json)")


def _calibrate(given: argparse.Namespace) -> None:
    links = calibrate(given.device, given.mesh, given.file)
    if dist.get_rank() == 0:
        for axis, link in enumerate(links):
            rate = f"{link.bandwidth / 1e9:.3f} GB/s"
            print(f"axis {axis}: {link.latency * 1e6:.1f} us, {rate}", flush=True)
        print(f"written to {given.file}", flush=True)
    dist.destroy_process_group()


def _add_explain(commands: Any) -> None:
    command = commands.add_parser(
        "explain",
        help="run a script and report its communication, time and memory",
        description="Run a script to its end and report all that it does, or with --step one call "
        "of one of its functions. Under torchrun each rank writes a page of its own: "
        "torchrun --nproc-per-node 4 -m shardwise explain train.py",
    )
    command.add_argument("--step", help="the function of the script to report; without it all")
    command.add_argument("--call", type=int, default=2, help="which call of the function (2)")
    command.add_argument("--html", type=Path, default=Path("report.html"), help="(report.html)")
    command.add_argument("--trace", type=Path, help="a file for Perfetto or chrome://tracing")
    command.add_argument("script", type=Path)
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")


def _explain(given: argparse.Namespace) -> None:
    report = explain_script(given.script, given.arguments, given.step, given.call)
    rank = report.ranks[0]
    if rank == 0:
        print(report)
    for file, write in ((given.html, report.write_html), (given.trace, report.write_trace)):
        if file is not None:
            own = file.with_suffix(f".{rank}{file.suffix}") if rank else file
            print(f"written to {write(own)}", flush=True)


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
