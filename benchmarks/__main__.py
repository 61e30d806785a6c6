"""``python -m benchmarks COMMAND``.

All use the models of ``benchmarks.inflate``, except ``aarch64``, ``clients``, ``exactness``, ``families``,
``gpu-host``, ``losslessness``, ``precision``, ``real`` and ``real-size``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

COMMANDS = (
    "aarch64",
    "auto",
    "clients",
    "decode",
    "exactness",
    "families",
    "gpu-host",
    "kernels",
    "losslessness",
    "lookup",
    "methods",
    "opening",
    "peers",
    "precision",
    "ranks",
    "real",
    "real-size",
    "serve",
    "soak",
    "turns",
)


class _Command(argparse.ArgumentParser):
    """A benchmark's parser, which imports the module on use, so that each benchmark needs only its own dependencies."""

    def __init__(self, *, module: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._module = module

    def parse_known_args(self, args: Any = None, namespace: Any = None, **options: Any) -> Any:
        if self._module is not None:
            name, self._module = self._module, None
            module = importlib.import_module(name)
            self.description = module.__doc__
            module.add_arguments(self)
            self.set_defaults(main=module.main)
        return super().parse_known_args(args, namespace, **options)


def parser() -> argparse.ArgumentParser:
    """The argument parser of all benchmarks."""
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, parser_class=_Command)
    for name in COMMANDS:
        module = f"benchmarks.{name.replace('-', '_')}"
        commands.add_parser(name, module=module, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    return top


def main() -> int:
    """Runs a benchmark."""
    try:
        arguments = parser().parse_args()
        code: int = arguments.main(arguments)
    except ModuleNotFoundError as error:
        sys.exit(f"benchmarks: error: {error}; this benchmark needs more than the others: pip install -e '.[dev]'")
    return code


if __name__ == "__main__":
    sys.exit(main())
