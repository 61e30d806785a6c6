"""The notebook in ``examples/`` runs from its first cell to its last, and its charts show what it measured."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

pytestmark = [pytest.mark.exporter, pytest.mark.slow]

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_notebook_draws_its_measurements() -> None:
    notebook = nbformat.read(EXAMPLES / "speedup.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)  # they would change with each run
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": EXAMPLES}}).execute()
    printed = "".join(output.text for cell in cells for output in cell.outputs if output.get("name") == "stdout")
    measured = re.findall(r"K = (\d): ([\d.]+)x, ([\d.]+) tokens a step", printed)
    assert [int(k) for k, *_ in measured] == [1, 2, 3, 4, 6, 8]
    for which, cell in enumerate(cells[-2:], start=1):
        (shown,) = cell.outputs
        drawn = ElementTree.fromstring(shown["data"]["image/svg+xml"])
        titles = [output.text or "" for output in drawn.iter("{http://www.w3.org/2000/svg}title")]
        points = re.findall(r": ([\d.]+) at (\d)", "\n".join(titles))
        assert [(k, round(float(y), 2)) for y, k in points] == [
            (output[0], pytest.approx(float(output[which]), abs=0.011)) for output in measured
        ]
    length = [float(output[2]) for output in measured]
    assert 1 < length[0] < 2 < length[3] < 5  # K = 1 and 4
