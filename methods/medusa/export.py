"""Reads, writes and exports Medusa heads in the layout of ``FasterDecoding/Medusa`` and in ours.

A folder holds ``config.json`` with ``medusa_num_heads`` and ``medusa_num_layers``, and the heads in
``medusa_lm_head.safetensors`` or ``medusa_lm_head.pt``; or it is a full model trained together with its heads
(Medusa-2), whose safetensors have them under ``medusa_head.``. In our layout, ``tie_lm_head: true`` says that heads end
in the model's own projection; ``{i}.{layers}.weight`` is then ``[H,H]`` instead of ``[V,H]``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from specexport.contract.errors import BuildError, SpecExportError
from specexport.contract.folders import expanded
from specexport.contract.methods import MethodOptions, RankedMethod
from specexport.contract.methods.suggestion import Device
from specexport.contract.tree import TokenTree
from specexport.exporter.build_state import BuildPlan
from specexport.exporter.checkpoints.accuracy import HeadAccuracy, MeasuredConfig, accuracy_config, assumed_chance
from specexport.exporter.checkpoints.checkpoint import Checkpoint, clamp_tokens, load_reference, reference_states
from specexport.exporter.checkpoints.documents import CONFIG, read_config
from specexport.exporter.checkpoints.stored import (
    StoredTensor,
    pickled_tensors,
    require_tensors,
    save_head_tensors,
    shapes_of,
    stored_tensors,
)
from specexport.exporter.method import Array, MethodExporter, TargetInfo, Verification
from specexport.exporter.options import BuildOptions
from specexport.graphs.propose import MAX_TOP_K
from specexport.methods.medusa import Medusa, MedusaOptions
from specexport.methods.medusa.graph import HeadCandidates, MedusaHeads

WEIGHTS = "medusa_lm_head"
COMPATIBLE = "fasterdecoding"
"""Subfolder with the heads in the layout of ``FasterDecoding/Medusa``."""
PUBLISHED_ACCURACY = (0.56, 0.32, 0.20, 0.15)
"""Top-1 accuracy of heads 1 to 4 of Vicuna-7B (arXiv 2401.10774)."""
_PREFIX = "medusa_head."
_NAME = re.compile(r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")
_MAX_HEADS, _MAX_LAYERS = 16, 16
O = TypeVar("O", bound=MethodOptions)
H = TypeVar("H", bound=RankedMethod)


class _Config(MeasuredConfig, kw_only=True):
    """The fields that are read from ``config.json``; other keys, such as a full model's, are ignored."""

    medusa_num_heads: int | None = None
    medusa_num_layers: int | None = None
    tie_lm_head: bool = False
    medusa_choices: list[list[int]] | None = None


@dataclass(frozen=True)
class HeadsOutline:
    """The configuration of a checkpoint's heads, without their weights.

    Attributes:
        file: the file that holds the heads; the folder if there are several.
        stored: the tensors by their names in ``MedusaHeads``.
        accuracy: the heads' accuracy, if training measured it.
    """

    path: Path
    file: Path
    stored: Mapping[str, StoredTensor]
    count: int
    layers: int
    tied: bool
    tree: TokenTree | None
    accuracy: HeadAccuracy | None

    def make(self, *, hidden: int, vocab: int) -> MedusaHeads:
        """The heads for a model of these sizes on torch's meta device, checked against the headers of the files."""
        with torch.device("meta"):
            heads = MedusaHeads(self.count, self.layers, hidden, vocab, tied=self.tied)
        tied = " that share the model's head" if self.tied else ""
        what = (
            f"{self.count} heads of {self.layers} layers{tied}, as {self.path / CONFIG} says, for a model of hidden "
            f"size {hidden} and {vocab} tokens; heads of other sizes were trained for another model"
        )
        shapes = shapes_of(heads)
        require_tensors(self.file, {name: self.stored[name] for name in self.stored if name in shapes}, shapes, what)
        return heads

    def load(self, *, hidden: int, vocab: int) -> MedusaHeads:
        """Loads the heads in fp32 and evaluation mode; shapes are checked before memory is allocated."""
        heads = self.make(hidden=hidden, vocab=vocab)
        heads.load_state_dict({name: self.stored[name].finite(self.file) for name in heads.state_dict()}, assign=True)
        return heads.eval().requires_grad_(False)


def read_medusa(folder: Path) -> HeadsOutline:
    """Reads the configuration of a folder's heads, without their weights.

    No code in the files runs: a ``.pt`` file is read with ``weights_only=True``.
    """
    stored, file = _open(folder)
    path = folder / CONFIG
    if not path.is_file():
        raise BuildError(f"{folder}: no {CONFIG}; expected Medusa heads ({CONFIG} and {WEIGHTS}.safetensors or .pt)")
    config = read_config(path, _Config, "Medusa heads")
    matches = {name: _NAME.fullmatch(name) for name in stored}
    wrong = sorted(name for name, match in matches.items() if match is None)
    if wrong:
        raise BuildError(
            f"{file}: tensor {wrong[0]!r} is not part of Medusa heads; expected names such as '0.0.linear.weight' and "
            "'0.1.weight'"
        )
    in_file = 1 + max((int(match[1]) for match in matches.values() if match is not None), default=-1)
    of_first = sum(name.startswith("0.") and name.endswith(".linear.weight") for name in stored)
    stated = config.medusa_num_heads
    # Published configurations name two of Vicuna's five heads; FasterDecoding's own code loads all five.
    heads = in_file if stated is None or 0 < stated < in_file else stated
    layers = config.medusa_num_layers if config.medusa_num_layers is not None else of_first
    if not 1 <= heads <= _MAX_HEADS or not 0 <= layers <= _MAX_LAYERS:
        raise BuildError(
            f"{path}: {heads} heads of {layers} layers; expected 1 to {_MAX_HEADS} heads of 0 to {_MAX_LAYERS} layers"
        )
    if heads > in_file:
        raise BuildError(f"{path}: medusa_num_heads is {heads}, but {file} holds {in_file} heads")
    tree, accuracy = _tree(path, config, heads), config.accuracy(path, heads, "heads")
    return HeadsOutline(folder, file, stored, heads, layers, config.tie_lm_head, tree, accuracy)


def _tree(path: Path, config: _Config, heads: int) -> TokenTree | None:
    if config.medusa_choices is None:
        return None
    try:
        tree = TokenTree.from_choices(config.medusa_choices)
    except SpecExportError as error:
        raise BuildError(f"{path}: medusa_choices: {error}") from error
    if tree.depth > heads:
        raise BuildError(f"{path}: medusa_choices go {tree.depth} deep, with {heads} heads")
    return tree


def _open(folder: Path) -> tuple[dict[str, StoredTensor], Path]:
    """The heads' tensors by their names in ``MedusaHeads``, and the file to name in errors."""
    if not folder.is_dir():
        raise BuildError(f"{folder}: no such folder; expected Medusa heads ({CONFIG} and {WEIGHTS}.safetensors or .pt)")
    single, pickled, file = folder / f"{WEIGHTS}.safetensors", folder / f"{WEIGHTS}.pt", folder
    if single.is_file():
        stored, file = stored_tensors(single), single
    elif pickled.is_file():
        stored, file = pickled_tensors(pickled), pickled
    else:
        tensors = [tensor for path in sorted(folder.glob("*.safetensors")) for tensor in stored_tensors(path)]
        stored = [tensor for tensor in tensors if tensor.name.startswith(_PREFIX)]
    if not stored:
        raise BuildError(
            f"{file}: no Medusa heads; expected {WEIGHTS}.safetensors, {WEIGHTS}.pt, or a full model whose "
            f"safetensors hold tensors named {_PREFIX}*"
        )
    return {tensor.name.removeprefix(_PREFIX): tensor for tensor in stored}, file


def save_medusa(
    folder: Path,
    heads: MedusaHeads,
    lm_head: torch.Tensor,
    *,
    base: str,
    accuracy: HeadAccuracy | None = None,
    compatible: bool = True,
) -> None:
    """Writes heads in our layout and, in a subfolder, in the layout of ``FasterDecoding/Medusa``.

    Args:
        lm_head: weight of the model's head, ``[V,H]``, which the subfolder's files multiply tied heads by.
        compatible: whether to write the subfolder; for tied heads it is many times larger than the rest.
    """
    config = _config(heads, base) | {"tie_lm_head": heads.tied, **accuracy_config(accuracy)}
    save_head_tensors(folder, config, heads.state_dict(), f"{WEIGHTS}.safetensors")
    if compatible:
        save_compatible(folder / COMPATIBLE, heads, lm_head, base=base)


def save_compatible(folder: Path, heads: MedusaHeads, lm_head: torch.Tensor, *, base: str) -> None:
    """Writes heads in the layout of ``FasterDecoding/Medusa``, each with a projection; see :func:`save_medusa`."""
    full = heads.state_dict()
    if heads.tied:
        for head in range(len(heads)):
            name = f"{head}.{heads.layers}.weight"
            full[name] = (lm_head.detach().float() @ full[name].float()).to(full[name].dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(_config(heads, base), indent=2) + "\n", encoding="utf-8")
    with (folder / f"{WEIGHTS}.pt").open("wb") as file:
        torch.save(full, file)


def _config(heads: MedusaHeads, base: str) -> dict[str, Any]:
    return {
        "model_type": "medusa",
        "medusa_num_heads": len(heads),
        "medusa_num_layers": heads.layers,
        "base_model_name_or_path": base,
        "hidden_size": heads.hidden,
        "vocab_size": heads.vocab,
    }


class HeadsExporter(MethodExporter[O, H]):
    """Base of exporters of Medusa heads; trees follow from the heads' measured or published accuracy."""

    earlier_accuracy: ClassVar[tuple[float, ...]] = ()
    """Assumed accuracies of the depths before the heads' depths."""
    heads_key: ClassVar[str] = "model"
    """The method's field that names the heads' folder."""

    def tree_of_size(self, method: H, size: int) -> TokenTree:
        """See :class:`MethodExporter`; the best tree of that size, by measured or else by published accuracies."""
        heads, earlier = self._heads(method), self.earlier_accuracy

        def chance(path: tuple[int, ...]) -> float:
            first, ahead = assumed_chance(path[: len(earlier)], earlier), path[len(earlier) :]
            if heads.accuracy is None:
                return first * assumed_chance(ahead, PUBLISHED_ACCURACY)
            return first * heads.accuracy.paths.get(ahead, 0.0) if ahead else first

        return TokenTree.best(chance, size + 1, method.candidates, len(earlier) + heads.count)

    def default_trees(self, method: H, device: Device) -> tuple[TokenTree, ...]:
        """See :class:`MethodExporter`; the checkpoint's tree, if it has one."""
        published = self._heads(method).tree
        return (published,) if published is not None else super().default_trees(method, device)

    def _heads(self, method: H) -> HeadsOutline:
        return read_medusa(expanded(getattr(method, self.heads_key)))


class MedusaExporter(HeadsExporter[MedusaOptions, Medusa]):
    """Exports heads as part of the target."""

    def resolve(self, options: MedusaOptions, target: TargetInfo) -> Medusa:
        folder = expanded(options.model)
        heads = read_medusa(folder)
        modules = heads.make(hidden=target.hidden, vocab=target.vocab)
        return Medusa(
            trees=(),
            model=str(folder.resolve()),
            heads=heads.count,
            candidates=min(MAX_TOP_K, target.vocab),
            parameters=sum(parameter.numel() for parameter in modules.parameters()),
            weights=target.draft_storage,
        )

    def add_to_target(self, method: Medusa, target: Checkpoint, build: BuildOptions, plan: BuildPlan) -> HeadCandidates:
        return HeadCandidates(heads_of(method.model, target), target.model, method.candidates)

    def compare(self, method: Medusa, run: Verification) -> Iterator[tuple[Array, Array]]:
        target, heads = run.bundle.manifest.target, run.source(method)
        recorded = run.recorded(method)
        model = load_reference(run.source(None), target)
        for text, tokens in recorded:
            # The heads have read all tokens but the last; the first row is from the model's own head.
            expected = reference_heads(model, heads, clamp_tokens(text[:-1], model))
            yield expected[1:, : target.vocab_size], tokens


def heads_of(source: str, model: Checkpoint) -> MedusaHeads:
    """Loads the heads of a model."""
    hidden = int(model.model.get_output_embeddings().weight.shape[1])
    return read_medusa(expanded(source)).load(hidden=hidden, vocab=model.vocab_size)


def reference_heads(model: Any, heads: Path, text: Array) -> Array:
    """Logits of a model and of its Medusa heads after the last token of a text, float32 ``[1+N,V]``."""
    head = model.get_output_embeddings()
    base, hidden = reference_states(model, text)
    loaded = read_medusa(heads).load(hidden=int(head.weight.shape[1]), vocab=int(head.weight.shape[0]))
    with torch.no_grad():
        return torch.cat([base[-1:], loaded.logits(hidden[-1], head)]).numpy()


EXPORTER = MedusaExporter()
