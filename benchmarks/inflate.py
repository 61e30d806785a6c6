"""Enlarge a small Llama checkpoint without changing what it computes.

Speed depends on a model's size, answers on its training. A small trained model is embedded here in a larger one: the
residual stream, the heads, the feed-forward width and the number of layers all grow, every new weight is dense and of
ordinary size, and yet the new dimensions of the residual stream stay close to zero, because whatever would write to
them, or from a new unit to the old ones, is tiny. The large model costs what its size says and answers as the small
one does, so that a trained pair of a few million parameters can stand in for one of hundreds of millions.

    python -m benchmarks.inflate --source examples/models/demo-target --out /tmp/target-290m --params 290e6
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specexport.methods.medusa.export import read_medusa, save_medusa
from specexport.methods.medusa.graph import MedusaHeads
from specexport.methods.mlp_speculator.export import read_speculator, save_speculator

TINY = 3e-9  # of the standard deviation of the embedding: next to nothing beside what float32 rounds off
WIDTHS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
FFN_PER_WIDTH = 2.75
WIDTH_PER_LAYER = 64
DRAFT_WIDTH_PER_LAYER = 256  # drafts are wide and shallow: a small layer costs its operators' overhead, not its weights
LAYERS = "model.layers."
WRITERS = ("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight")
COPIED_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "generation_config.json")
SAMPLE_TEXTS = (
    "def add(first, second):\n    return first + second\n\n\ndef test_add():\n    assert add(1, 2) ==",
    "import json\nfrom pathlib import Path\n\n\nclass Store:\n    def __init__(self, path):\n        self.path = Path(",
    "The quick brown fox jumps over the lazy dog, and then it goes on to tell the whole story once again.",
)


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama model."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    ffn: int
    vocab: int
    tied: bool

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """Read the sizes from a parsed config.json."""
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            layers=config["num_hidden_layers"],
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    def as_config(self) -> dict[str, Any]:
        """The keys of config.json that say these sizes."""
        return {
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.ffn,
        }

    def layer_tensors(self) -> dict[str, tuple[int, ...]]:
        """The tensors of one layer, by the name they have within it."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "input_layernorm.weight": (self.hidden,),
            "self_attn.q_proj.weight": (query, self.hidden),
            "self_attn.k_proj.weight": (key, self.hidden),
            "self_attn.v_proj.weight": (key, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, query),
            "post_attention_layernorm.weight": (self.hidden,),
            "mlp.gate_proj.weight": (self.ffn, self.hidden),
            "mlp.up_proj.weight": (self.ffn, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.ffn),
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """All tensors of the model, in the order they are written."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            shapes.update({f"{LAYERS}{layer}.{name}": shape for name, shape in self.layer_tensors().items()})
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes

    @property
    def params(self) -> int:
        """How many parameters the model has; a tied output layer is not counted twice."""
        return sum(_count(shape) for shape in self.tensors().values())


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def choose_shape(source: Shape, params: float, width_per_layer: int = WIDTH_PER_LAYER) -> Shape:
    """The widest usual shape of about `params` parameters that is not too shallow for its width and holds `source`.

    A shape is too shallow if it has fewer layers than its width over `width_per_layer`.
    """
    best: Shape | None = None
    for width in WIDTHS:
        heads = width // source.head_dim
        kv_heads = heads * source.kv_heads // source.heads
        ffn = round(width * FFN_PER_WIDTH / source.head_dim) * source.head_dim
        fits = width >= source.hidden and heads >= source.heads and ffn >= source.ffn
        if not fits or heads * source.kv_heads % source.heads:
            continue
        shape = Shape(width, heads, kv_heads, source.head_dim, 1, ffn, source.vocab, source.tied)
        per_layer = sum(_count(tensor) for tensor in shape.layer_tensors().values())
        layers = 1 + round((params - shape.params) / per_layer)
        if layers >= max(source.layers, width // width_per_layer):
            best = replace(shape, layers=layers)
            # Whole layers are coarse steps; the feed-forward width takes what is left over.
            left = (params - best.params) / (3 * width * layers)
            best = replace(best, ffn=max(source.ffn, ffn + round(left / source.head_dim) * source.head_dim))
    if best is None:
        raise ValueError(
            f"no shape of about {params:.3g} parameters holds a model of {source.params:,} parameters with "
            f"{source.layers} layers and hidden size {source.hidden}; ask for more parameters"
        )
    return best


def real_layers(source_layers: int, layers: int) -> dict[int, int]:
    """Where the source's layers go among the pass-through ones: {new layer: source layer}, spread evenly."""
    return {(2 * index + 1) * layers // (2 * source_layers): index for index in range(source_layers)}


class Source:
    """The tensors of the small checkpoint, read one at a time."""

    def __init__(self, folder: Path) -> None:
        index_file, single_file = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index_file.is_file():
            weight_map = json.loads(index_file.read_text(encoding="utf-8"))["weight_map"]
            self.files = {name: folder / file for name, file in weight_map.items()}
        elif single_file.is_file():
            with safe_open(single_file, framework="pt") as tensors:
                self.files = dict.fromkeys(tensors.keys(), single_file)
        else:
            raise ValueError(f"{folder} has no model.safetensors")

    def __call__(self, name: str) -> torch.Tensor:
        if name not in self.files:
            raise ValueError(f"the source checkpoint has no tensor {name}")
        with safe_open(self.files[name], framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(name)
        return tensor.to(torch.float32)


class Inflation:
    """Builds the tensors of the large model, each on its own, from the small one's."""

    def __init__(self, source: Source, small: Shape, large: Shape, seed: int) -> None:
        self.source, self.small, self.large, self.seed = source, small, large, seed
        self.norm_scale = (small.hidden / large.hidden) ** 0.5
        self.tiny = TINY * float(source("model.embed_tokens.weight").std())
        self.source_layer = real_layers(small.layers, large.layers)

    def __call__(self, name: str) -> torch.Tensor:
        """The tensor called `name` of the large model."""
        shape = self.large.tensors()[name]
        old = self._old(name)
        if len(shape) == 1:
            return self._norm(old)
        std = self.tiny if name.endswith(WRITERS) else self._usual_std(name, old)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        new = torch.randn(shape, generator=generator).mul_(std)
        if old is not None:
            new[: old.shape[0], : old.shape[1]] = old
        return new

    def _old(self, name: str) -> torch.Tensor | None:
        """The source's tensor that this one embeds; a pass-through layer embeds none."""
        if not name.startswith(LAYERS):
            return self.source(name)
        layer, kind = name.removeprefix(LAYERS).split(".", 1)
        real = self.source_layer.get(int(layer))
        return None if real is None else self.source(f"{LAYERS}{real}.{kind}")

    def _usual_std(self, name: str, old: torch.Tensor | None) -> float:
        if old is None:
            old = self.source(f"{LAYERS}0.{name.removeprefix(LAYERS).split('.', 1)[1]}")
        return float(old.std())

    def _norm(self, old: torch.Tensor | None) -> torch.Tensor:
        new = torch.ones(self.large.hidden)
        if old is not None:
            new[: old.shape[0]] = old
        return new.mul_(self.norm_scale)


def write_tensors(path: Path, shapes: dict[str, tuple[int, ...]], make: Inflation) -> None:
    """Write one float32 safetensors file, holding one tensor at a time in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 4 * _count(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name in shapes:
            file.write(make(name).contiguous().numpy().data.cast("B"))


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a checkpoint that can be enlarged; a ValueError says why another cannot."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no config.json")
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if config.get("model_type") != "llama":
        raise ValueError(f"{folder} is a {config.get('model_type')} model; only llama can be enlarged")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError(f"{folder} has biases in its layers, which this does not enlarge")
    return config


def inflate(
    source: Path,
    out: Path,
    params: float | None = None,
    shape: Shape | None = None,
    seed: int = 0,
    width_per_layer: int = WIDTH_PER_LAYER,
) -> Shape:
    """Write the enlarged checkpoint of `source` to `out` and return its shape.

    Give either `params`, from which a usual shape is chosen (see `choose_shape`), or the `shape` itself.
    """
    config = read_config(source)
    small = Shape.of(config)
    if shape is None:
        if params is None:
            raise ValueError("say how large the model is to be: params or shape")
        shape = choose_shape(small, params, width_per_layer)
    _check_holds(small, shape)
    out.mkdir(parents=True, exist_ok=True)
    for pattern in COPIED_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, out / file.name)
    config.update(shape.as_config())
    config["rms_norm_eps"] = config.get("rms_norm_eps", 1e-6) * small.hidden / shape.hidden
    config["dtype"] = "float32"
    config.pop("torch_dtype", None)
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    write_tensors(out / "model.safetensors", shape.tensors(), Inflation(Source(source), small, shape, seed))
    return shape


def inflate_heads(source: Path, out: Path, small: Path, large: Path, seed: int = 0) -> None:
    """Enlarge tied Medusa heads along with their model, without changing what they propose.

    Args:
        source: folder of the heads of the small model, which end in its own language-model head.
        out: folder to write.
        small: the small model.
        large: the same, enlarged.
        seed: of the new weights.
    """
    outline = read_medusa(source)
    old, new = Shape.of(read_config(small)), Shape.of(read_config(large))
    if not outline.tied:
        raise ValueError(f"{source} has projections of its own to the vocabulary; only tied heads are enlarged")
    heads = outline.load(hidden=old.hidden, vocab=old.vocab)
    inflated = MedusaHeads(outline.count, outline.layers, new.hidden, new.vocab, tied=True)
    tiny = TINY * float(Source(small)("model.embed_tokens.weight").std())
    originals = heads.state_dict()
    with torch.no_grad():
        for name, parameter in inflated.named_parameters():
            weight = originals[name]
            parameter.zero_()
            if parameter.ndim == 2:
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
                parameter.normal_(0.0, float(weight.std()), generator=generator)
                parameter[old.hidden :] *= tiny  # what they write to stays next to nothing
                parameter[: old.hidden, : old.hidden] = weight
            else:
                parameter[: old.hidden] = weight
    accuracy = outline.accuracy
    save_medusa(out, inflated, torch.empty(0), base=large.name, accuracy=accuracy, compatible=False)


def inflate_speculator(source: Path, out: Path, small: Path, large: Path, seed: int = 0) -> None:
    """Enlarge an MLP speculator along with its target, without changing what it proposes.

    Its inner states grow as much as the target's hidden state.

    Args:
        source: folder of the small target's speculator.
        out: folder to write.
        small: the small target.
        large: the same, enlarged.
        seed: of the new weights.
    """
    outline = read_speculator(str(source))
    old, new = Shape.of(read_config(small)), Shape.of(read_config(large))
    outline.require_fit(hidden=old.hidden, vocab=old.vocab)
    grown = replace(outline, hidden=new.hidden, inner=outline.inner * new.hidden // old.hidden)
    originals, inflated = outline.load().state_dict(), grown.make()
    tiny = TINY * float(Source(small)("model.embed_tokens.weight").std())
    # A norm divides by the root of a mean over more numbers, and embeddings are multiplied with the root of their size.
    narrower = (outline.inner / grown.inner) ** 0.5
    scales = {"ln": narrower, "emb": narrower}
    if grown.scale_input:
        scales["proj.0"] = (old.hidden / new.hidden) ** 0.5
    with torch.no_grad():
        for name, parameter in inflated.named_parameters():
            weight = originals[name]
            scale = scales.get(name.rpartition(".")[0], scales.get(name.partition(".")[0], 1.0))
            if parameter.ndim == 1:
                parameter.fill_(narrower if name.endswith("weight") else 0.0)
                parameter[: len(weight)] = weight * (narrower if name.endswith("weight") else 1.0)
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            parameter.normal_(0.0, float(weight.std()), generator=generator)
            # What they write to the new half of a state stays next to nothing.
            written = parameter[:, outline.inner :] if name.startswith("emb") else parameter[outline.inner :]
            if not name.startswith("head"):
                written *= tiny
            parameter[: weight.shape[0], : weight.shape[1]] = weight * scale
    save_speculator(out, inflated, widths=outline.widths, accuracy=outline.accuracy)


def inflate_states_draft(source: Path, out: Path, small: Path, large: Path, seed: int = 0) -> None:
    """Enlarge an EAGLE-3 or DFlash draft along with its target, without changing what it proposes.

    It grows as much as the target's hidden state, and keeps its number of layers. It sees the states after the layers
    of the large target that do what those of the small one did.

    Args:
        source: folder of the small target's draft, as ``SafeAILab/EAGLE`` or ``z-lab`` publish them.
        out: folder to write.
        small: the small target.
        large: the same, enlarged.
        seed: of the new weights.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    old, new, draft_shape = Shape.of(read_config(small)), Shape.of(read_config(large)), Shape.of(config)
    if draft_shape.hidden != old.hidden:
        raise ValueError(f"{source}: its states are {draft_shape.hidden} wide; expected {old.hidden}, as the target's")
    by = new.hidden // old.hidden
    grown = replace(
        draft_shape,
        hidden=new.hidden,
        heads=by * draft_shape.heads,
        kv_heads=by * draft_shape.kv_heads,
        ffn=by * draft_shape.ffn,
    )
    tiny = TINY * float(Source(small)("model.embed_tokens.weight").std())
    tables = ("embed_tokens", "lm_head")
    narrow, wide = draft_shape.layer_tensors(), grown.layer_tensors()
    inflated = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        weight, kind = tensor.float(), name.rpartition(".")[0].rpartition(".")[2]
        if not tensor.is_floating_point() or kind in ("q_norm", "k_norm"):
            inflated[name] = tensor
            continue
        if weight.ndim == 1:
            inflated[name] = torch.ones(grown.hidden)
            inflated[name][: len(weight)] = weight
            inflated[name] *= (draft_shape.hidden / grown.hidden) ** 0.5
            continue
        key = next((suffix for suffix in narrow if suffix.endswith(f".{kind}.weight")), None)
        each, (rows, reads) = (draft_shape.hidden, (grown.hidden,) * 2) if key is None else (narrow[key][1], wide[key])
        rows = len(weight) if kind in tables else rows
        # It may read several states side by side: of each the new part is next to nothing.
        blocks = weight.shape[1] // each
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        writes = kind in ("fc", "o_proj", "down_proj", *tables)
        parts = torch.randn(rows, blocks, reads, generator=generator).mul_(tiny if writes else float(weight.std()))
        parts[: len(weight), :, :each] = weight.reshape(len(weight), blocks, each)
        inflated[name] = parts.reshape(rows, -1)
    places = {layer: place for place, layer in real_layers(old.layers, new.layers).items()}
    after = {0: 0} | {layer + 1: place + 1 for layer, place in places.items()}
    config |= grown.as_config() | {"rms_norm_eps": config["rms_norm_eps"] * draft_shape.hidden / grown.hidden}
    counted = "eagle_aux_hidden_state_layer_ids"
    if counted in config:
        config[counted] = [after[count] for count in config[counted]]
        config.pop("eagle_config", None)  # says the same
    else:
        drafting = config["dflash_config"]
        drafting["target_layer_ids"] = [after[layer + 1] - 1 for layer in drafting["target_layer_ids"]]
        config["num_target_layers"] = new.layers
    out.mkdir(parents=True, exist_ok=True)
    save_file(inflated, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _check_holds(small: Shape, large: Shape) -> None:
    for field in ("hidden", "heads", "kv_heads", "layers", "ffn"):
        if getattr(large, field) < getattr(small, field):
            raise ValueError(f"the enlarged model has a smaller {field} than its source")
    if large.heads * small.kv_heads != small.heads * large.kv_heads:
        raise ValueError("the enlarged model must have as many heads per key-value head as its source")
    for field in ("head_dim", "vocab", "tied"):
        if getattr(large, field) != getattr(small, field):
            raise ValueError(f"the enlarged model must have the same {field} as its source")


@dataclass(frozen=True)
class Agreement:
    """How closely the enlarged model follows its source."""

    positions: int
    same_choice: int
    largest_difference: float

    @property
    def exact(self) -> bool:
        """Whether both models choose the same next token everywhere."""
        return self.same_choice == self.positions


def compare(source: Path, out: Path, prompts: list[list[int]]) -> Agreement:
    """Run both models over the prompts and compare their logits at every position."""
    positions, same, largest = 0, 0, 0.0
    for expected, actual in zip(_logits(source, prompts), _logits(out, prompts), strict=True):
        positions += expected.shape[0]
        same += int((expected.argmax(-1) == actual.argmax(-1)).sum())
        largest = max(largest, float((expected - actual).abs().max()))
    return Agreement(positions, same, largest)


def _logits(folder: Path, prompts: list[list[int]]) -> Iterator[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    for prompt in prompts:
        # Not around the yield: two such generators taken in turns would restore each other's mode.
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt])).logits[0]
        yield logits


def read_prompts(folder: Path, prompts: Path | None, number: int = 4, tokens: int = 128) -> list[list[int]]:
    """The first tokens of a few prompts: of a JSON-lines file with a `text` each, else of texts built in."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if prompts is None:
        texts = list(SAMPLE_TEXTS)
    else:
        with prompts.open(encoding="utf-8") as lines:
            texts = [json.loads(line)["text"] for line in lines if line.strip()]
    return [tokenizer(text)["input_ids"][:tokens] for text in texts[:number]]


def main(arguments: list[str] | None = None) -> int:
    """Enlarge a checkpoint from the command line, and compare it with its source."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inflate", description=__doc__.split("\n\n")[0])
    parser.add_argument("--source", type=Path, required=True, help="folder of the small checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the large one to")
    parser.add_argument("--params", type=float, default=290e6, help="about how many parameters (default 290e6)")
    parser.add_argument(
        "--width-per-layer", type=int, default=WIDTH_PER_LAYER, help="how shallow it may be (default 64; drafts 256)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the new weights (default 0)")
    parser.add_argument("--prompts", type=Path, help="JSON lines with a text each, to compare on (default: built in)")
    args = parser.parse_args(arguments)
    try:
        shape = inflate(args.source, args.out, params=args.params, seed=args.seed, width_per_layer=args.width_per_layer)
        agreement = compare(args.source, args.out, read_prompts(args.source, args.prompts))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{args.out}: {shape.params:,} parameters, {shape.layers} layers, hidden {shape.hidden}, "
        f"{shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, ffn {shape.ffn}"
    )
    print(
        f"same next token as {args.source} at {agreement.same_choice} of {agreement.positions} positions, "
        f"logits at most {agreement.largest_difference:.1e} apart"
    )
    if not agreement.exact:
        print("error: the enlarged model chooses other tokens than its source", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
