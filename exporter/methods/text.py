"""Methods that read text alone: they need nothing of a build but chains that the target verifies."""

from __future__ import annotations

from specexport.contract.methods import TextMethod
from specexport.exporter.methods import MethodExporter


class TextExporter(MethodExporter[TextMethod]):
    """Nothing is exported."""


EXPORTER = TextExporter()
