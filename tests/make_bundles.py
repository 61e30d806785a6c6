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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # more are slower on models this small; torch reads it when imported

import torch
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

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
from tests.ways import ways

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
    """A target of a family, and how it speculates."""

    family: str
    draft: str | None  # equal, near (with noise), bad (unrelated), other (near, and its tokens have other numbers)
    choices: tuple[int, ...] = ()  # numbers of draft tokens beside the default
    default: int | None = None  # draft tokens a step; None where trees say it
    config: dict[str, Any] = field(default_factory=dict)  # settings of the family's configuration to replace
    heads: str | None = None  # whose Medusa heads there are: target or draft
    trees: tuple[TokenTree, ...] = ()  # what they fill
    lookups: tuple[str, ...] = ()
    lowering: LoweredAs = "native"
    lookahead: tuple[int, int, int] | None = None  # W, N and G
    self_draft: int | None = None  # how many of the target's layers draft
    speculator: bool = False
    eagle3: bool = False
    dflash: bool = False
    mtp: bool = False
    batch: int = 1
    embeds: bool = False  # whether prompts may hold embeddings
    backend: BackendName = "onnxruntime"


HEADS = 3
_TEXTS = ("ngram", "suffix", "hypothesis")
_SPINE = TokenTree.from_choices([[0], [1], [2], [0, 0], [0, 1], [0, 0, 0], [0, 0, 1], [0, 0, 2]])
_SMALL_SPINE = TokenTree.from_choices([[0], [1], [0, 0]])
_BUSHY = TokenTree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 3], [0, 0, 0], [0, 0, 1], [1, 0, 0]])
_SMALL = TokenTree.from_choices([[0], [1], [0, 0], [1, 0], [0, 0, 0]])


RECIPES = {
    "llama-near": Recipe("llama", "near", (1, 2, 7), 4),
    "qwen3-bad": Recipe("qwen3", "bad", (1,), 3),
    "gemma2-equal": Recipe("gemma2", "equal", (1,), 5),
    "gpt2-near": Recipe("gpt2", "near", (1,), 6),
    "qwen3-medusa": Recipe("qwen3", None, heads="target", trees=(_BUSHY, _SMALL, TokenTree.chain(HEADS + 1))),
    "qwen3-medusa-draft": Recipe("qwen3", "equal", (3,), 6, heads="draft"),
    "qwen3-mlp": Recipe("qwen3", None, trees=(_BUSHY, TokenTree.chain(HEADS + 1)), speculator=True, batch=8),
    "gpt2-tree": Recipe("gpt2", "near", trees=(_SPINE,), choices=(2,)),
    "qwen3-lookup": Recipe("qwen3", "equal", lookups=_TEXTS),
    "qwen3-lookahead": Recipe("qwen3", None, lookahead=(5, 4, 4)),
    "gemma2-self": Recipe("gemma2", None, (1,), 4, self_draft=1),
    "gemma2-embeds": Recipe("gemma2", None, lookups=_TEXTS, lookahead=(3, 3, 2), self_draft=1, batch=2, embeds=True),
    "granite-embeds": Recipe("granite", None, heads="target", trees=(_SMALL,), lowering="portable", embeds=True),
    "dice-self": Recipe("llama", None, (1, 3), 5, {**DICE, "num_hidden_layers": 2}, self_draft=1),
    "dice-lookahead": Recipe("llama", None, config=DICE, lookahead=(3, 3, 3)),
    **{f"dice-{draft}": Recipe("llama", draft, (1, 3), 5, DICE) for draft in ("equal", "near", "bad")},
    "dice-tree": Recipe("llama", "near", config=DICE, trees=(_SPINE,)),
    "dice-mixed": Recipe("llama", "near", config=DICE, trees=(_SPINE, _SMALL_SPINE), lookups=("ngram",)),
    "dice-medusa": Recipe("llama", None, config=DICE, heads="target", trees=(_BUSHY,)),
    "dice-medusa-draft": Recipe("llama", "near", config=DICE, heads="draft", trees=(_BUSHY,)),
    "dice-mlp": Recipe("llama", None, config=DICE, trees=(_BUSHY,), speculator=True),
    "dice-eagle3": Recipe("llama", None, config=DICE, trees=(_SPINE, _SMALL_SPINE), eagle3=True),
    "dice-dflash": Recipe("llama", None, config=DICE, trees=(_BUSHY, _SMALL), dflash=True),
    "dice-mtp": Recipe("glm4_moe", None, config=DICE_EXPERTS, trees=(_SPINE, _SMALL_SPINE), mtp=True),
    "dice-hybrid": Recipe("qwen3_5_text", None, (1, 3), 5, DICE_HYBRID, mtp=True),
    "dice-hybrid-draft": Recipe("qwen3_5_text", "near", (1, 3), 5, DICE_HYBRID, mtp=True),
    **{
        f"{family}-hybrid": Recipe(family, "near", (1, 3), 5, lookups=_TEXTS)
        for family in ("lfm2", "qwen3_5_text", "granitemoehybrid")
    },
    **{f"dice-{text}": Recipe("llama", None, (1, 3), 5, DICE, lookups=(text,)) for text in _TEXTS},
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
_SPINES, _ANY = (_SPINE, _SMALL_SPINE), (_BUSHY, _SMALL)
_HEAD_CHAINS = tuple(TokenTree.chain(size + 1) for size in _CHAINS)
_DEEP = {**DICE, "num_hidden_layers": 2}
LOSSLESSNESS = {
    "draft": Recipe("llama", "near", _CHAINS[1:], _CHAINS[0], DICE),
    "draft-tree": Recipe("llama", "near", config=DICE, trees=_SPINES),
    "universal": Recipe("llama", "other", _CHAINS[1:], _CHAINS[0], DICE),
    "self": Recipe("llama", None, _CHAINS[1:], _CHAINS[0], _DEEP, self_draft=1),
    "self-tree": Recipe("llama", None, config=_DEEP, trees=_SPINES, self_draft=1),
    "medusa": Recipe("llama", None, config=DICE, heads="target", trees=_HEAD_CHAINS),
    "medusa-tree": Recipe("llama", None, config=DICE, heads="target", trees=_ANY),
    "medusa-draft": Recipe("llama", "near", config=DICE, heads="draft", trees=_HEAD_CHAINS),
    "medusa-draft-tree": Recipe("llama", "near", config=DICE, heads="draft", trees=_ANY),
    "mlp": Recipe("llama", None, config=DICE, trees=_HEAD_CHAINS, speculator=True),
    "mlp-tree": Recipe("llama", None, config=DICE, trees=_ANY, speculator=True),
    "eagle3": Recipe("llama", None, config=DICE, trees=_HEAD_CHAINS, eagle3=True),
    "eagle3-tree": Recipe("llama", None, config=DICE, trees=_SPINES, eagle3=True),
    "mtp": Recipe("glm4_moe", None, config=DICE_EXPERTS, trees=_HEAD_CHAINS, mtp=True),
    "mtp-tree": Recipe("glm4_moe", None, config=DICE_EXPERTS, trees=_SPINES, mtp=True),
    "dflash": Recipe("llama", None, config=DICE, trees=_HEAD_CHAINS, dflash=True),
    "dflash-tree": Recipe("llama", None, config=DICE, trees=_ANY, dflash=True),
    "texts": Recipe("llama", None, _CHAINS[1:], _CHAINS[0], DICE, lookups=_TEXTS),
    "lookahead": Recipe("llama", None, config=DICE, lookahead=(3, 3, 3)),
}
"""Of ``python -m benchmarks losslessness``: of each method chains alone or trees alone, of several sizes."""
LOSSLESSNESS = {name: dataclasses.replace(recipe, batch=8) for name, recipe in LOSSLESSNESS.items()}
RECIPES |= {f"{name}-portable": dataclasses.replace(RECIPES[name], lowering="portable") for name in PORTABLE}
_NOISE = {"gpt2": 0.05}
_DICE_NOISE = 0.3


def make(name: str, root: Path, recipe: Recipe | None = None) -> Path:
    """The bundle of a name in a folder, made if it is not there; safe to call from several processes.

    A recipe makes one that ``RECIPES`` does not have.
    """
    folder = root / name
    if not folder.exists():  # a build renames it into place when it is whole
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{name}.making"):
            if not folder.exists():
                build(_options(name, root, recipe or RECIPES[name]))
    return folder


def _options(name: str, root: Path, recipe: Recipe) -> BuildOptions:
    """What makes a bundle, with its checkpoints and, beside where it will be, what transformers says of its target."""
    target = _target(recipe, root)
    with FileLock(root / f".{target.name}.lock"):  # others are made meanwhile
        if not target.exists():
            _make_target(recipe, target)
        oracle = target.with_suffix(".embeds.json" if recipe.embeds else ".json")
        if not oracle.exists():
            oracle.write_text(json.dumps(_oracle(recipe, target)), encoding="utf-8")
        shutil.copy(oracle, root / f"{name}.json")
        draft = _draft(recipe, target, root) if recipe.draft is not None else None
        medusa = _heads(recipe, target, root) if recipe.heads == "target" else None
        draft_medusa = _heads(recipe, draft, root) if recipe.heads == "draft" and draft else None
        mlp_speculator = _speculator(target, root) if recipe.speculator else None
        eagle3 = _over_states("eagle3", target, root) if recipe.eagle3 else None
        dflash = _over_states("dflash", target, root) if recipe.dflash else None
    sizes = (*([] if recipe.default is None else [recipe.default]), *recipe.choices)
    return BuildOptions(
        target=str(target),
        output=root / name,
        methods=ways(
            draft=None if recipe.draft == "other" else draft,
            universal_draft=draft if recipe.draft == "other" else None,
            medusa=medusa,
            draft_medusa=draft_medusa,
            mlp_speculator=mlp_speculator,
            eagle3=eagle3,
            dflash=dflash,
            mtp=recipe.mtp,
            lookups=recipe.lookups,
            prompt_lookup_min=1 if recipe.config else 2,
            lookahead=recipe.lookahead,
            self_draft=recipe.self_draft,
            sizes=sizes,
            trees=recipe.trees,
        ),
        inputs_embeds=recipe.embeds,
        lowering=recipe.lowering,
        backend=recipe.backend,
        max_batch_size=recipe.batch,
        draft_precision="fp32",  # where the draft is the target, everything must be accepted
    )


def _target(recipe: Recipe, root: Path) -> Path:
    """The folder of its checkpoint."""
    learnt = recipe.heads or recipe.lookups or recipe.lookahead or recipe.speculator
    calm = learnt and not recipe.config and not recipe.embeds
    kind = "-dice" if recipe.config else "-calm" if calm else ""
    return root / "checkpoints" / f"{recipe.family}{kind}{'-deep' if recipe.config and recipe.self_draft else ''}"


def _make_target(recipe: Recipe, folder: Path) -> None:
    if recipe.mtp:  # few tokens: a random layer is right often enough
        make_mtp(folder, recipe.family, **recipe.config)
    else:
        make_checkpoint(folder, recipe.family, calm="-calm" in folder.name, **recipe.config)


def _heads(recipe: Recipe, model: Path, root: Path) -> str:
    folder = root / "checkpoints" / f"{model.name}-heads"
    if not folder.exists():
        # Where tokens are few, random heads are right often enough.
        make_heads(folder, model, HEADS, tied=bool(recipe.config))
    return str(folder)


def _speculator(model: Path, root: Path) -> str:
    folder = root / "checkpoints" / f"{model.name}-speculator"
    if not folder.exists():
        # Where tokens are few, random stages are right often enough.
        dice = "dice" in model.name
        make_speculator(folder, model, HEADS, tied=dice, scale_input=dice, steps=0 if dice else 60)
    return str(folder)


def _over_states(method: str, model: Path, root: Path) -> Path:
    """A draft over the states of a target of one layer and few tokens: a random one is right often enough."""
    folder = root / "checkpoints" / f"{model.name}-{method}"
    if folder.exists():
        return folder
    if method == "eagle3":
        return make_eagle3(folder, model, states=(0, 1), draft_vocab=DICE_VOCAB - 3)
    return make_dflash(folder, model, states=(0, 1), layers=2, published="speculators")


def _draft(recipe: Recipe, target: Path, root: Path) -> Path:
    if recipe.draft == "equal":
        return target
    folder = root / "checkpoints" / f"{target.name}-{recipe.draft}"
    if folder.exists():
        return folder
    if recipe.draft == "bad":
        return make_checkpoint(folder, recipe.family, seed=1, **{"num_hidden_layers": 1, **recipe.config})
    model: Any = AutoModelForCausalLM.from_pretrained(target)
    generator = torch.Generator().manual_seed(2)
    noise = _DICE_NOISE if recipe.config else _NOISE.get(recipe.family, 0.03)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
        if recipe.draft == "other":
            for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
                weight.copy_(weight.flip(0))
    model.save_pretrained(folder)
    (reversed_tokenizer(model.config.vocab_size) if recipe.draft == "other" else tokenizer()).save_pretrained(folder)
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
