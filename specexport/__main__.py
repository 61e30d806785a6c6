"""``python -m specexport``."""

import sys

from specexport.cli import main

sys.exit(main())
