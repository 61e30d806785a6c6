"""A draft with another tokenizer: what it says is translated, and never changes what the target says."""

import shutil
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specexport.contract.errors import BuildError
from specexport.contract.reading import read_manifest
from specexport.contract.tree import TokenTree
from specexport.methods.universal_draft import UniversalDraftProposer
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.proposal import Proposal, Proposer, SlotView
from specexport.runtime.speculative import PLAIN
from tests.manifests import rewritten

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
def test_text_is_translated_both_ways():
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
def test_nothing_is_proposed_within_a_character():
    from tests.checkpoints import tokenizer

    target = tokenizer().backend_tokenizer
    tokens = target.encode("one \u20ac", add_special_tokens=False).ids  # three bytes, a token each
    assert target.decode(tokens[:-1]).endswith("\ufffd")
    assert proposer(Scripted(TEXT), target).propose([view(list(tokens[:-1]))]) == {}


@pytest.mark.exporter
def test_decoding_is_lossless(tmp_path):
    from specexport.exporter.build import build
    from specexport.exporter.options import BuildOptions
    from specexport.verify.bundle import verify
    from tests.checkpoints import VOCAB, make_checkpoint
    from tests.make_bundles import reversed_tokenizer

    target = make_checkpoint(tmp_path / "target", "llama", num_hidden_layers=1, calm=True)
    draft = make_checkpoint(tmp_path / "draft", "llama", num_hidden_layers=1, calm=True)
    reversed_tokenizer(VOCAB).save_pretrained(draft)  # bytes alone, each by another number than the target's
    options = {"target": str(target), "output": tmp_path / "bundle", "max_seq_len": 128}
    build(BuildOptions(methods=f"universal_draft:{draft}", **options))
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
        build(BuildOptions(methods=(f"draft_model:{draft}", f"universal_draft:{draft}"), **options, overwrite=True))


def test_the_tokenizer_must_be_listed(tmp_path, bundle):
    from specexport.contract.errors import BundleError

    folder = shutil.copytree(bundle("dice-near"), tmp_path / "bundle")
    fields = {"method": "universal_draft", "tokenizer": "../tokenizer.json", "split_special_tokens": False}
    rewritten(folder, lambda document: document["methods"][0].update(fields))
    with pytest.raises(BundleError, match="is used but not listed under files"):
        read_manifest(folder)
