"""Drafts with another tokenizer, whose text is translated, and the target's own first layers: the same text."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specexport.cli import main
from specexport.contract.errors import BuildError
from specexport.contract.reading import read_manifest
from specexport.contract.tree import TokenTree
from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions
from specexport.methods.universal_draft import UniversalDraftProposer
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.proposal import Proposal, Proposer, SlotView
from specexport.runtime.speculative import PLAIN
from specexport.verify.bundle import verify
from tests.checkpoints import make_checkpoint
from tests.fixtures import Bundles, Engines
from tests.manifests import Document, rewritten
from tests.ways import ways

GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
TEXT = "one two three one two three"


def letters() -> Tokenizer:
    """A tokenizer of single characters."""
    vocab = {chr(code): code for code in range(32, 128)}
    built = Tokenizer(models.WordLevel({**vocab, "?": 63}, unk_token="?"))
    built.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    built.decoder = decoders.Fuse()
    return built


class Scripted(Proposer):
    """In the place of a draft: goes on with a text it knows, and keeps what it was shown."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.seen: list[str] = []

    def propose(self, sequences: list[SlotView]) -> dict[int, Proposal]:
        results = {}
        for sequence in sequences:
            self.seen.append("".join(map(chr, sequence.tokens)))
            ahead = self.text[len(sequence.tokens) :][: len(sequence.tree) - 1]
            tokens = np.array([ord(letter) for letter in ahead])
            results[sequence.slot] = Proposal(tokens, sequence.tree, None, tokens[:, None])
        return results

    def release(self, slot: int) -> None:
        pass


def proposer(draft: Any, target: Tokenizer, longest: int = 100) -> UniversalDraftProposer:
    trees = [TokenTree.chain(size + 1) for size in (8, 4, 3, 2, 1)]
    return UniversalDraftProposer(draft, target, letters(), trees, longest)


def view(tokens: list[int], size: int = 8) -> SlotView:
    return SlotView(0, tokens, SamplingParams(), np.random.default_rng(0), TokenTree.chain(size + 1))


@pytest.mark.exporter  # the tokenizer of its checkpoints
def test_text_is_translated_both_ways() -> None:
    from tests.checkpoints import tokenizer

    target = tokenizer().backend_tokenizer
    draft = Scripted(TEXT)
    first = proposer(draft, target)
    whole = target.encode(TEXT, add_special_tokens=False).ids
    done = target.encode("one two", add_special_tokens=False).ids
    proposals = first.propose([view(list(done))])[0]
    assert draft.seen == ["one two"]
    # Eight letters of the draft are as many of the target's tokens as they make.
    assert proposals.tokens.tolist() == target.encode(" three o", add_special_tokens=False).ids[: len(proposals.tokens)]
    assert whole[len(done) : len(done) + 1] == proposals.tokens[:1].tolist()
    assert proposals.q is None
    assert len(proposals.tree) == len(proposals.tokens) + 1
    first.propose([view([*done, *proposals.tokens.tolist()[:1]])])
    assert draft.seen[1].startswith("one two ")
    # A text the draft has no room for is gone on with plainly.
    assert proposer(draft, target, longest=10).propose([view(list(done))]) == {}


@pytest.mark.exporter  # the tokenizer of its checkpoints
def test_nothing_is_proposed_within_a_character() -> None:
    from tests.checkpoints import tokenizer

    target = tokenizer().backend_tokenizer
    tokens = target.encode("one \u20ac", add_special_tokens=False).ids  # three bytes, a token each
    assert target.decode(tokens[:-1]).endswith("\ufffd")
    assert proposer(Scripted(TEXT), target).propose([view(list(tokens[:-1]))]) == {}


@pytest.mark.exporter
def test_decoding_is_lossless(tmp_path: Path) -> None:
    from specexport.exporter.build import build
    from specexport.exporter.options import BuildOptions
    from specexport.verify.bundle import verify
    from tests.checkpoints import VOCAB, make_checkpoint
    from tests.make_bundles import reversed_tokenizer

    target = make_checkpoint(tmp_path / "target", "llama", num_hidden_layers=1, calm=True)
    draft = make_checkpoint(tmp_path / "draft", "llama", num_hidden_layers=1, calm=True)
    reversed_tokenizer(VOCAB).save_pretrained(draft)  # bytes alone, each by another number than the target's
    options = {"target": str(target), "output": tmp_path / "bundle", "max_seq_len": 128}
    build(BuildOptions(methods=ways(universal_draft=draft), **options))
    (method,) = read_manifest(tmp_path / "bundle").methods
    assert (tmp_path / "bundle" / method.tokenizer).is_file()
    with Engine.load(tmp_path / "bundle", threads=1) as engine:
        for prompt in (TEXT, "some words", [5, 6, 7, 8]):
            plain = engine.generate(prompt, GREEDY, PLAIN)
            for size in (1, 2, 4):
                done = engine.generate(prompt, GREEDY, {"num_speculative_tokens": size})
                assert done.token_ids == plain.token_ids
        sampled = GREEDY.replace(temperature=0.8, seed=3)
        assert engine.generate(TEXT, sampled).token_ids == engine.generate(TEXT, sampled).token_ids
        done = engine.generate(TEXT, GREEDY)
        assert done.stats.drafted > 0
    report = verify(tmp_path / "bundle", prompts=(TEXT,), max_tokens=8)
    assert report.verdict == "passed", report
    with pytest.raises(BuildError, match="'draft_model' and 'universal_draft' both have a draft"):
        build(BuildOptions(methods=ways(draft=draft, universal_draft=draft), **options, overwrite=True))


def test_the_tokenizer_must_be_listed(tmp_path: Path, bundle: Bundles) -> None:
    from specexport.contract.errors import BundleError

    folder = shutil.copytree(bundle("dice-near"), tmp_path / "bundle")
    fields = {"method": "universal_draft", "tokenizer": "../tokenizer.json", "split_special_tokens": False}
    rewritten(folder, lambda document: document["methods"][0].update(fields))
    with pytest.raises(BundleError, match="is used but not listed under files"):
        read_manifest(folder)


# --- the target's first layers ----------------------------------------------------------------------------------------


NAME = "gemma2-self"


@pytest.mark.exporter
def test_it_is_the_targets_first_layers(bundle: Bundles, engine: Engines) -> None:
    report = verify(bundle(NAME), prompts=("one two three", "some words of it"), max_tokens=12)
    assert report.verdict == "passed", report
    names = [check.name for check in report.checks]
    assert names == ["files", "graphs", "logits", "quality", "self_draft", "speculation"]
    manifest = engine(NAME).manifest
    (method,) = manifest.methods
    assert (method.layers, len(method.draft.cache), len(manifest.target.cache)) == (1, 1, 2)
    assert method.draft.parameters < manifest.target.parameters


@pytest.mark.exporter
@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_no_weight_is_stored_twice(tmp_path: Path, precision: Any) -> None:
    target = str(make_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=3))
    options = {"target": target, "precision": precision, "max_seq_len": 128}
    plain = build(BuildOptions(output=tmp_path / "plain", **options))
    both = build(BuildOptions(output=tmp_path / "both", methods=ways(self_draft=2, sizes=(2,)), **options))
    sizes = [(folder / "target" / "weights.bin").stat().st_size for folder in (plain, both)]
    # Small constants of the second graph apart, such as masks; a matrix alone is several pages.
    assert sizes[0] <= sizes[1] < sizes[0] + 4 * 4096
    assert not (both / "draft").exists()
    with Engine.load(plain, threads=1) as loaded, Engine.load(both, threads=1) as other:
        prompt = [int(token) for token in np.random.default_rng(2).integers(3, 300, 20)]
        tokens = other.generate(prompt, GREEDY)
        assert tokens.token_ids == loaded.generate(prompt, GREEDY).token_ids
        assert tokens.stats.drafted > 0


@pytest.mark.exporter
def test_layers_it_cannot_have_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=2)
    for count in (0, 2):
        with pytest.raises(BuildError, match=f"layers is {count}, but .* has 2 layers; expected 1 to 1|>= 1"):
            build(BuildOptions(target=str(target), output=tmp_path / "out", methods=ways(self_draft=count)))
    assert not (tmp_path / "out").exists()
    words = ["build", "--target", str(target), "-o", str(tmp_path / "out"), "--max-seq-len", "128"]
    assert main([*words, "--self-draft-layers", "1", "--num-speculative-tokens", "2", "--ngram"]) == 0
    assert [type(method).__name__ for method in read_manifest(tmp_path / "out").methods] == ["SelfDraft", "Ngram"]
    shown = " ".join(capsys.readouterr().out.split())
    assert "self_draft, the target's first layer: 2 draft tokens a step" in shown


@pytest.mark.exporter
def test_its_shape_points_are_checked(bundle: Bundles, tmp_path: Path) -> None:
    folder = shutil.copytree(bundle(NAME), tmp_path / "bundle")

    def narrow(document: Document) -> None:
        graph = document["methods"][0]["draft"]["graph"]
        graph["points"] = [point for point in graph["points"] if point["tokens"] < 64]

    rewritten(folder, narrow)
    with pytest.raises(Exception, match="no shape point of the self_draft has 64 tokens"):
        read_manifest(folder)
