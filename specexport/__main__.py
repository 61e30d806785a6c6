"""``python -m specexport``, and the command ``specexport``."""

import signal
import sys
import warnings


def main() -> int:
    """Runs the command line. Ctrl-C ends it with status 130 and SIGTERM with 143, also while it is being imported.

    Both end it as an error does, so that temporary files are removed and the terminal is restored.
    """
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"  # without a line of our code
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
