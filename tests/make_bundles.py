"""Makes the bundles the tests run, with what transformers says their targets generate.

    python -m tests.make_bundles DIR

The tests make them by themselves; made beforehand, and named in ``SPECEXPORT_TEST_BUNDLES``, they let every test that
is not marked ``exporter`` run where torch is not installed. Beside each bundle lies a JSON file of the same name:

``greedy``
    Prompts, the tokens that ``generate(do_sample=False)`` continues them with, and for each of those tokens how far its
    logit is above the second largest.
``embeds``
    For bundles whose prompts may hold embeddings: prompts as lists of parts, token ids or embeddings, and what
    ``generate(inputs_embeds=...)`` continues them with; ``ids`` where the embeddings are those of tokens.
``next_logits``
    For models of few tokens, the logits after the prompt and every text of up to two tokens, by text (``"3 11"``).
"""

import argparse
import dataclasses
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # more are slower on models this small; torch reads it when imported

import torch
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from specexport.building import damage
from specexport.contract.engines import BackendName
from specexport.contract.model import LoweredAs
from specexport.contract.tree import TokenTree
from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions
from tests.checkpoints import (
    EOS,
    VOCAB,
    make_checkpoint,
    make_dflash,
    make_eagle3,
    make_heads,
    make_mtp,
    make_speculator,
    tokenizer,
)

CONTEXT = 512
DICE_VOCAB = 12
DICE_PROMPT = (5, 8, 5, 8)
# One layer and few tokens: tens of thousands of texts take seconds, and every text of three tokens is common enough.
DICE: dict[str, Any] = {
    "vocab_size": DICE_VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
DICE_EXPERTS: dict[str, Any] = {
    **DICE,
    "head_dim": 8,
    "first_k_dense_replace": 0,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
}
DICE_HYBRID: dict[str, Any] = {
    **DICE,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "published": "qwen",
}


@dataclass(frozen=True)
class Recipe:
    """A target of a family, and how it speculates.

    The draft of a method is ``equal``, ``near`` (with noise), ``bad`` (unrelated) or ``other`` (near, and its tokens
    have other numbers); whatever else methods need is made for the target, or for the draft.
    """

    family: str
    methods: list[dict[str, Any]]
    config: dict[str, Any] = field(default_factory=dict)  # settings of the family's configuration to replace
    lowering: LoweredAs = "native"
    batch: int = 1
    embeds: bool = False  # whether prompts may hold embeddings
    backend: BackendName = "onnxruntime"


def way(method: str, *sizes: int, **options: Any) -> dict[str, Any]:
    """A method with its numbers of draft tokens, the default first, and other options."""
    numbers = {"num_speculative_tokens": list(sizes)} if sizes else {}
    return {"method": method, **numbers, **options}


def draft(model: str, *sizes: int, **options: Any) -> dict[str, Any]:
    return way("draft_model", *sizes, model=model, **options)


def texts(*sizes: int, least: int = 2) -> list[dict[str, Any]]:
    """The methods that look in text; ``least`` is the shortest n-gram."""
    return [way("ngram", *sizes, prompt_lookup_min=least), way("suffix", *sizes), way("hypothesis", *sizes)]


HEADS = 3
_SPINE = TokenTree.from_choices([[0], [1], [2], [0, 0], [0, 1], [0, 0, 0], [0, 0, 1], [0, 0, 2]])
_SMALL_SPINE = TokenTree.from_choices([[0], [1], [0, 0]])
_BUSHY = TokenTree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 3], [0, 0, 0], [0, 0, 1], [1, 0, 0]])
_SMALL = TokenTree.from_choices([[0], [1], [0, 0], [1, 0], [0, 0, 0]])
_SPINES, _ANY = [_SPINE, _SMALL_SPINE], [_BUSHY, _SMALL]
_DEEP = {**DICE, "num_hidden_layers": 2}


RECIPES = {
    "llama-near": Recipe("llama", [draft("near", 4, 1, 2, 7)]),
    "qwen3-bad": Recipe("qwen3", [draft("bad", 3, 1)]),
    "gemma2-equal": Recipe("gemma2", [draft("equal", 5, 1)]),
    "gpt2-near": Recipe("gpt2", [draft("near", 6, 1)]),
    "qwen3-medusa": Recipe("qwen3", [way("medusa", trees=[*_ANY, TokenTree.chain(HEADS + 1)])]),
    "qwen3-medusa-draft": Recipe("qwen3", [way("medusa_draft", 6, 3, model="equal")]),
    "qwen3-mlp": Recipe("qwen3", [way("mlp_speculator", trees=[_BUSHY, TokenTree.chain(HEADS + 1)])], batch=8),
    "gpt2-tree": Recipe("gpt2", [draft("near", 2, trees=[_SPINE])]),
    "qwen3-lookup": Recipe("qwen3", [draft("equal"), *texts()]),
    "qwen3-lookahead": Recipe("qwen3", [way("lookahead", preset="5,4,4")]),
    "gemma2-self": Recipe("gemma2", [way("self_draft", 4, 1, layers=1)]),
    "gemma2-embeds": Recipe(
        "gemma2", [way("self_draft", layers=1), *texts(), way("lookahead", preset="3,3,2")], batch=2, embeds=True
    ),
    "granite-embeds": Recipe("granite", [way("medusa", trees=[_SMALL])], lowering="portable", embeds=True),
    "dice-self": Recipe("llama", [way("self_draft", 5, 1, 3, layers=1)], _DEEP),
    "dice-lookahead": Recipe("llama", [way("lookahead", preset="3,3,3")], DICE),
    **{f"dice-{model}": Recipe("llama", [draft(model, 5, 1, 3)], DICE) for model in ("equal", "near", "bad")},
    "dice-tree": Recipe("llama", [draft("near", trees=[_SPINE])], DICE),
    "dice-mixed": Recipe("llama", [draft("near", trees=_SPINES), texts(least=1)[0]], DICE),
    "dice-medusa": Recipe("llama", [way("medusa", trees=[_BUSHY])], DICE),
    "dice-medusa-draft": Recipe("llama", [way("medusa_draft", model="near", trees=[_BUSHY])], DICE),
    "dice-mlp": Recipe("llama", [way("mlp_speculator", trees=[_BUSHY])], DICE),
    "dice-eagle3": Recipe("llama", [way("eagle3", trees=_SPINES)], DICE),
    "dice-dflash": Recipe("llama", [way("dflash", trees=_ANY)], DICE),
    "dice-mtp": Recipe("glm4_moe", [way("mtp", trees=_SPINES)], DICE_EXPERTS),
    "dice-hybrid": Recipe("qwen3_5_text", [way("mtp", 5, 1, 3)], DICE_HYBRID),
    "dice-hybrid-draft": Recipe("qwen3_5_text", [draft("near", 5, 1, 3), way("mtp", 5, 1, 3)], DICE_HYBRID),
    **{
        f"{family}-hybrid": Recipe(family, [draft("near", 5, 1, 3), *texts(5, 1, 3)])
        for family in ("lfm2", "qwen3_5_text", "granitemoehybrid")
    },
    **{f"dice-{text['method']}": Recipe("llama", [text], DICE) for text in texts(5, 1, 3, least=1)},
}
BATCHED = [
    *("llama-near", "gpt2-tree", "qwen3-medusa", "qwen3-medusa-draft", "qwen3-lookup", "qwen3_5_text-hybrid"),
    *("dice-near", "dice-mixed", "dice-medusa", "dice-mlp", "dice-eagle3", "dice-dflash", "dice-mtp", "dice-hybrid"),
]
RECIPES["dice-mtp-cuda"] = dataclasses.replace(RECIPES["dice-mtp"], backend="onnxruntime-cuda")
RECIPES |= {f"{name}-batch": dataclasses.replace(RECIPES[name], batch=8) for name in BATCHED}
"""With eight slots."""
PORTABLE = [
    *("llama-near", "llama-near-batch", "gemma2-equal", "gpt2-tree", "qwen3-medusa", "qwen3-medusa-draft"),
    *("lfm2-hybrid", "dice-mixed", "dice-mixed-batch", "dice-eagle3", "dice-dflash", "dice-hybrid"),
]
"""These are there lowered portably too, as ``{name}-portable``."""
_CHAINS = (3, 2, 1)
_HEAD_CHAINS = [TokenTree.chain(size + 1) for size in _CHAINS]
LOSSLESSNESS = {
    "draft": Recipe("llama", [draft("near", *_CHAINS)], DICE),
    "draft-tree": Recipe("llama", [draft("near", trees=_SPINES)], DICE),
    "universal": Recipe("llama", [way("universal_draft", *_CHAINS, model="other")], DICE),
    "self": Recipe("llama", [way("self_draft", *_CHAINS, layers=1)], _DEEP),
    "self-tree": Recipe("llama", [way("self_draft", layers=1, trees=_SPINES)], _DEEP),
    "medusa": Recipe("llama", [way("medusa", trees=_HEAD_CHAINS)], DICE),
    "medusa-tree": Recipe("llama", [way("medusa", trees=_ANY)], DICE),
    "medusa-draft": Recipe("llama", [way("medusa_draft", model="near", trees=_HEAD_CHAINS)], DICE),
    "medusa-draft-tree": Recipe("llama", [way("medusa_draft", model="near", trees=_ANY)], DICE),
    "mlp": Recipe("llama", [way("mlp_speculator", trees=_HEAD_CHAINS)], DICE),
    "mlp-tree": Recipe("llama", [way("mlp_speculator", trees=_ANY)], DICE),
    "eagle3": Recipe("llama", [way("eagle3", trees=_HEAD_CHAINS)], DICE),
    "eagle3-tree": Recipe("llama", [way("eagle3", trees=_SPINES)], DICE),
    "mtp": Recipe("glm4_moe", [way("mtp", trees=_HEAD_CHAINS)], DICE_EXPERTS),
    "mtp-tree": Recipe("glm4_moe", [way("mtp", trees=_SPINES)], DICE_EXPERTS),
    "dflash": Recipe("llama", [way("dflash", trees=_HEAD_CHAINS)], DICE),
    "dflash-tree": Recipe("llama", [way("dflash", trees=_ANY)], DICE),
    "texts": Recipe("llama", texts(*_CHAINS, least=1), DICE),
    "lookahead": Recipe("llama", [way("lookahead", preset="3,3,3")], DICE),
}
"""Of ``python -m benchmarks losslessness``: of each method chains alone or trees alone, of several sizes."""
LOSSLESSNESS = {name: dataclasses.replace(recipe, batch=8) for name, recipe in LOSSLESSNESS.items()}
RECIPES |= {f"{name}-portable": dataclasses.replace(RECIPES[name], lowering="portable") for name in PORTABLE}
_NOISE = {"gpt2": 0.05}
_DICE_NOISE = 0.3


def make(name: str, root: Path, recipe: Recipe | None = None) -> Path:
    """The bundle of a name in a folder, made unless it is there in this version's format.

    A recipe makes one that ``RECIPES`` does not have.
    """
    return built_once(root / name, lambda: _options(name, root, recipe or RECIPES[name]))


def built_once(folder: Path, options: Callable[[], BuildOptions]) -> Path:
    """A bundle, built unless it is there in this version's format; safe to call from several processes."""
    if damage(folder, check_hashes=False):  # a build renames it into place when it is whole
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.making")):
            if damage(folder, check_hashes=False):
                build(options())
    return folder


def _options(name: str, root: Path, recipe: Recipe) -> BuildOptions:
    """What makes a bundle, with its checkpoints and, beside where it will be, what transformers says of its target."""
    target = _target(recipe, root)
    with FileLock(root / f".{target.name}.lock"):  # others are made meanwhile
        if not target.exists():
            if recipe.methods[-1]["method"] == "mtp":  # few tokens: a random layer is right often enough
                make_mtp(target, recipe.family, **recipe.config)
            else:
                make_checkpoint(target, recipe.family, calm="-calm" in target.name, **recipe.config)
        oracle = target.with_suffix(".embeds.json" if recipe.embeds else ".json")
        if not oracle.exists():
            oracle.write_text(json.dumps(_oracle(recipe, target)), encoding="utf-8")
        shutil.copy(oracle, root / f"{name}.json")
        methods = [method | _models(method, recipe, target) for method in recipe.methods]
    return BuildOptions(
        target=str(target),
        output=root / name,
        methods=methods,
        inputs_embeds=recipe.embeds,
        lowering=recipe.lowering,
        backend=recipe.backend,
        max_batch_size=recipe.batch,
        draft_precision="fp32",  # where the draft is the target, everything must be accepted
        overwrite=True,
    )


def _target(recipe: Recipe, root: Path) -> Path:
    """The folder of its checkpoint."""
    names = {method["method"] for method in recipe.methods}
    calm = not recipe.config and not recipe.embeds and names - {"draft_model", "self_draft"}
    deep = "-deep" if recipe.config and "self_draft" in names else ""
    return root / "checkpoints" / f"{recipe.family}{'-dice' if recipe.config else '-calm' if calm else ''}{deep}"


def _models(method: dict[str, Any], recipe: Recipe, target: Path) -> dict[str, str]:
    """The checkpoints of a method, made if they are not there."""
    name = method["method"]
    if "model" not in method:
        return {"model": str(_beside(target, name))} if name in _MADE else {}
    model = _draft(method["model"], recipe, target)
    heads = {"medusa": str(_beside(model, "medusa"))} if name == "medusa_draft" else {}
    return {"model": str(model), **heads}


_MADE = ("medusa", "mlp_speculator", "eagle3", "dflash")
"""Methods that have a checkpoint made for the model."""


def _beside(model: Path, method: str) -> Path:
    """What a method has beside a model, made if it is not there; where tokens are few, if random, it is right often
    enough.
    """
    folder, dice = model.with_name(f"{model.name}-{method}"), "-dice" in model.name
    if folder.exists():
        return folder
    if method == "medusa":
        return make_heads(folder, model, HEADS, tied=dice)
    if method == "mlp_speculator":
        return make_speculator(folder, model, HEADS, tied=dice, scale_input=dice, steps=0 if dice else 60)
    if method == "eagle3":
        return make_eagle3(folder, model, states=(0, 1), draft_vocab=DICE_VOCAB - 3)
    return make_dflash(folder, model, states=(0, 1), layers=2, published="speculators")


def _draft(kind: str, recipe: Recipe, target: Path) -> Path:
    folder = target.with_name(f"{target.name}-{kind}")
    if kind == "equal":
        return target
    if folder.exists():
        return folder
    if kind == "bad":
        return make_checkpoint(folder, recipe.family, seed=1, **{"num_hidden_layers": 1, **recipe.config})
    model: Any = AutoModelForCausalLM.from_pretrained(target)
    generator = torch.Generator().manual_seed(2)
    noise = _DICE_NOISE if recipe.config else _NOISE.get(recipe.family, 0.03)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
        if kind == "other":
            for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
                weight.copy_(weight.flip(0))
    model.save_pretrained(folder)
    (reversed_tokenizer(model.config.vocab_size) if kind == "other" else tokenizer()).save_pretrained(folder)
    return folder


def reversed_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """The tokenizer of single bytes whose first tokens are the last of ours."""
    ours = tokenizer()
    names = {name: vocab - 1 - id for id, name in enumerate(ours.convert_ids_to_tokens(list(range(vocab))))}
    bytewise = Tokenizer(models.BPE(names, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytewise)


def _eager(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def _oracle(recipe: Recipe, target: Path) -> dict[str, Any]:
    if recipe.config:
        return {"next_logits": _next_logits(target)}
    return {"embeds": _from_embeds(target)} if recipe.embeds else {"greedy": _greedy(target)}


def _from_embeds(target: Path) -> list[dict[str, Any]]:
    """Prompts that begin, go on and end with embeddings, within a chunk of the prefill and across several."""
    model, draw = _eager(target), random.Random(0)
    generator = torch.Generator().manual_seed(5)
    layer = model.get_input_embeddings()

    def ids(count: int) -> list[int]:
        return [draw.randrange(3, VOCAB) for _ in range(count)]

    def rows(count: int) -> list[list[float]]:
        results: list[list[float]] = torch.randn(count, layer.weight.shape[1], generator=generator).tolist()
        return results

    again, words = rows(6), ids(12)
    embedded = layer(torch.tensor(words)).tolist()
    cases: list[dict[str, Any]] = [
        {"prompt": prompt}
        for prompt in (
            [rows(1)],
            [rows(9)],
            [rows(9)],
            [ids(3), rows(20), ids(4)],
            [rows(5), ids(3), rows(6)],
            [rows(64)],
            [ids(60), rows(80), ids(1)],
            [again, again, words[:4], again, words[:4]],
        )
    ]
    cases += [{"prompt": [embedded], "ids": words}, {"prompt": [embedded[:5], words[5:9], embedded[9:]], "ids": words}]
    for case in cases:
        parts = [
            layer(torch.tensor(part)) if isinstance(part[0], int) else torch.tensor(part) for part in case["prompt"]
        ]
        embeds = torch.cat(parts)[None]
        mask = torch.ones(embeds.shape[:2], dtype=torch.int64)
        completion = model.generate(inputs_embeds=embeds, attention_mask=mask, do_sample=False, max_new_tokens=24)
        case["tokens"] = completion[0].tolist()
    return cases


def _greedy(target: Path) -> list[dict[str, Any]]:
    model, draw = _eager(target), random.Random(0)
    cases: list[dict[str, Any]] = []
    # The last four make the cache grow to its second, third and last size, and end with the context.
    shapes = [(length, 4, 32) for length in (1, 2, 3, 9, 20, 64)]
    shapes += [(245, 1, 24), (375, 1, 24), (CONTEXT - 20, 1, 20), (CONTEXT - 1, 1, 1)]
    for length, rows, count in shapes:
        cases += _continued(model, [[draw.randrange(3, VOCAB) for _ in range(length)] for _ in range(rows)], count)
    return cases


def _continued(model: Any, prompts: list[list[int]], count: int) -> list[dict[str, Any]]:
    """Prompts of one length, so that none is padded."""
    ids = torch.tensor(prompts)
    completion = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(completion.logits, 1).topk(2).values
    cases = []
    for row, prompt in enumerate(prompts):
        tokens = completion.sequences[row, len(prompt) :].tolist()
        tokens = tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens
        gaps = (best[row, :, 0] - best[row, :, 1]).tolist()[: len(tokens)]
        cases.append({"prompt": prompt, "tokens": tokens, "gaps": gaps})
    return cases


def _next_logits(target: Path) -> dict[str, list[float]]:
    model, logits = _eager(target), {}
    for length in range(3):
        texts = list(itertools.product(range(DICE_VOCAB), repeat=length))
        with torch.no_grad():
            rows = model(torch.tensor([[*DICE_PROMPT, *text] for text in texts]), use_cache=False).logits[:, -1]
        logits.update({" ".join(map(str, text)): row for text, row in zip(texts, rows.tolist(), strict=True)})
    return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="these alone (default: all)")
    request = parser.parse_args()
    for name in request.names or RECIPES:
        print(make(name, request.folder))


if __name__ == "__main__":
    main()
