"""``python -m specexport``, and the command ``specexport``."""

import sys


def main() -> int:
    """Runs the command line. Ctrl-C ends it with status 130, also while it is being imported."""
    try:
        from specexport.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
