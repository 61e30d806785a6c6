"""Large matrices stay in the checkpoint's files while a bundle is built of them, and the bundle is the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specexport.exporter.build import build
from specexport.exporter.checkpoints import stored
from specexport.exporter.checkpoints.checkpoint import load_checkpoint
from specexport.exporter.checkpoints.config import stored_table
from specexport.exporter.graph_checks import reference
from specexport.exporter.options import BuildOptions
from tests.checkpoints import make_checkpoint, make_heads

pytestmark = pytest.mark.exporter


@pytest.fixture
def halved(tmp_path: Path) -> Path:
    """A checkpoint in bf16 but for its norms, as some are."""
    folder = make_checkpoint(tmp_path / "target", "qwen3")
    state = load_file(folder / "model.safetensors")
    state = {name: tensor if tensor.ndim == 1 else tensor.to(torch.bfloat16) for name, tensor in state.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def hashes(bundle: Path) -> dict[str, str]:
    files = sorted(path for path in bundle.rglob("*") if path.is_file() and path.name != "specexport.json")
    return {str(path.relative_to(bundle)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_bundles_are_those_of_a_model_that_is_held(
    halved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    results, heads = [], make_heads(tmp_path / "heads", halved, 2, tied=True)
    for large in (stored.LARGE, 1):
        monkeypatch.setattr(stored, "LARGE", large)
        methods = ({"method": "draft_model", "model": str(halved)}, {"method": "self_draft", "layers": 1})
        methods += ({"method": "medusa", "model": str(heads)},)  # which read the target's head too
        options = BuildOptions(
            target=str(halved), output=tmp_path / f"b{large}", methods=methods, precision=precision, max_seq_len=64
        )
        results.append(hashes(build(options)))
    assert results[0] == results[1] and len(results[0]) > 4


def test_matrices_are_in_memory_only_while_they_are_read(halved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_checkpoint(str(halved))
    monkeypatch.setattr(stored, "LARGE", 1)
    loaded = load_checkpoint(str(halved))
    state, held = load_file(halved / "model.safetensors"), dict(loaded.model.named_parameters())
    for name, parameter in held.items():
        assert bool(parameter.isnan().all()) == (parameter.ndim > 1), name
        assert parameter.untyped_storage().nbytes() == 4 * (1 if parameter.ndim > 1 else parameter.numel())
        tensor = stored.stored_tensor(parameter)
        assert tensor is None or torch.equal(tensor.read(), state[name])
    tokens = list(range(3, 40))
    assert (reference(loaded, tokens).logits == reference(whole, tokens).logits).all()
    assert dict(loaded.model.named_parameters()) == held  # nothing is left behind


def test_a_module_that_fails_holds_nothing(halved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "LARGE", 1)
    model = load_checkpoint(str(halved)).model
    head = model.get_output_embeddings()
    with stored.read_weights(model):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            head(torch.zeros(1, 7))
        assert bool(head.weight.isnan().all())


@pytest.mark.parametrize("same", [True, False])
def test_a_head_stored_beside_its_embedding_is_tied_as_in_transformers(
    halved: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    monkeypatch.setattr(stored, "LARGE", 1)
    state = load_file(halved / "model.safetensors")
    table = state["model.embed_tokens.weight"]
    state["lm_head.weight"] = table.clone() if same else 2 * table
    save_file(state, halved / "model.safetensors", {"format": "pt"})
    model = load_checkpoint(str(halved)).model
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == same
    for head, name in ((False, "model.embed_tokens.weight"), (True, "lm_head.weight")):
        assert torch.equal(stored_table(halved, head=head).read(), state[name])
