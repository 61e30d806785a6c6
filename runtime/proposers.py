"""Opens proposers."""

from __future__ import annotations

from dataclasses import dataclass

from specexport.contract.methods import Method, part
from specexport.runtime.backend import Backend, Graph
from specexport.runtime.buffers import buffers
from specexport.runtime.bundle import Bundle
from specexport.runtime.proposal import Proposer


@dataclass(frozen=True)
class Opening:
    """What proposers are opened with."""

    bundle: Bundle
    backend: Backend
    slots: int

    def graph(self, method: Method) -> Graph:
        """Loads the graph of a method's own model.

        Raises:
            BackendError: the backend refuses it.
        """
        ((role, model),) = method.models.items()
        return self.backend.open(model, self.slots, buffers(method.signatures[role]))


def open_proposer(method: Method, opening: Opening) -> Proposer:
    """Loads what a method needs.

    Raises:
        BackendError: the backend refuses a graph.
        RequestError: an option of the method makes no sense here.
    """
    module = part(method, "propose", inherited=True)
    assert module is not None, f"method {method.name!r} has no module propose"
    proposer: Proposer = module.open_proposer(method, opening)
    return proposer
