"""``python -m benchmarks COMMAND``.

The models are those that ``benchmarks.inflate`` makes, but for ``exactness``, ``gpu-host``, ``losslessness`` and
``real-size``.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks import (
    auto,
    decode,
    exactness,
    gpu_host,
    lookup,
    losslessness,
    methods,
    operators,
    peers,
    ranks,
    real_size,
    serve,
    soak,
    turns,
)


def parser() -> argparse.ArgumentParser:
    """The argument parser of all benchmarks."""
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    for module in (
        auto,
        decode,
        exactness,
        gpu_host,
        losslessness,
        lookup,
        methods,
        operators,
        peers,
        ranks,
        real_size,
        serve,
        soak,
        turns,
    ):
        command = commands.add_parser(
            module.__name__.rpartition(".")[2].replace("_", "-"),
            description=module.__doc__,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(main=module.main)
    return top


def main() -> int:
    """Runs a benchmark."""
    arguments = parser().parse_args()
    code: int = arguments.main(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main())
