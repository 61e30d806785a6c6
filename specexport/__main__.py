"""The command ``specexport``, also as ``python -m specexport``."""

import faulthandler
import signal
import sys
import warnings


def main() -> int:
    """Runs the command line; returns its exit status.

    Ctrl-C ends it with status 130 and SIGTERM with 143, even during imports. Both raise exceptions, so that temporary
    files are removed and the terminal is restored. Errors in native code, which end it at once, are printed with the
    place: a truncated file of an open bundle is a bus error.
    """
    if sys.stderr is not None:
        faulthandler.enable()
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"  # without the line of code that warns
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        from specexport.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130
    except MemoryError:
        print("specexport: error: there is not enough memory", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
