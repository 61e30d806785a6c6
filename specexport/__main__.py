"""``python -m specexport``, and the command ``specexport``."""

import signal
import sys


def main() -> int:
    """Runs the command line. Ctrl-C ends it with status 130 and SIGTERM with 143, also while it is being imported.

    Both end it as an error does, so that temporary files are removed and the terminal is restored.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        from specexport.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
