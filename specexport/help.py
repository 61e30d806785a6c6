"""How the command line shows its defaults."""

from __future__ import annotations

import argparse


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a flag's default, but not where there is none or the text says it already."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = "(default" in (action.help or "")
        nothing = action.default is None or action.default is False or action.default == []
        return action.help if said or nothing else super()._get_help_string(action)
