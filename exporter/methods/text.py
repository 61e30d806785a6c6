"""Methods that read text alone: they need nothing of a build but chains that the target verifies."""

from __future__ import annotations

from specexport.contract.methods import TextMethod, method_name
from specexport.exporter.methods import MethodExporter, Suggestion, Wanted


class TextExporter(MethodExporter[TextMethod]):
    """Nothing is exported."""

    def suggest(self, kind: type[TextMethod], wanted: Wanted) -> Suggestion | None:
        """See :class:`MethodExporter`; without flags, as every bundle has it."""
        sizes = ",".join(map(str, kind.default_sizes))
        return Suggestion(method_name(kind), f"chains of {sizes}", kind.suits, 3) if kind.suits else None


EXPORTER = TextExporter()
