"""The target's first layers as its draft: their graph, the weights they share, and what they propose."""

import shutil

import numpy as np
import pytest

from specexport.contract.errors import BuildError
from specexport.contract.reading import read_manifest
from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions
from specexport.runtime import Engine, SamplingParams
from specexport.verify.bundle import verify
from tests.checkpoints import make_checkpoint
from tests.manifests import Document, rewritten

pytestmark = pytest.mark.exporter
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
NAME = "gemma2-self"


def test_it_is_the_targets_first_layers(bundle, engine):
    report = verify(bundle(NAME), prompts=("one two three", "some words of it"), max_tokens=12)
    assert report.verdict == "passed", report
    names = [check.name for check in report.checks]
    assert names == ["files", "graphs", "logits", "quality", "self_draft", "speculation"]
    manifest = engine(NAME).manifest
    (method,) = manifest.methods
    assert (method.layers, len(method.draft.cache), len(manifest.target.cache)) == (1, 1, 2)
    assert method.draft.parameters < manifest.target.parameters


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_no_weight_is_stored_twice(tmp_path, precision):
    target = str(make_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=3))
    options = {"target": target, "precision": precision, "max_seq_len": 128}
    plain = build(BuildOptions(output=tmp_path / "plain", **options))
    both = build(BuildOptions(output=tmp_path / "both", methods="self_draft:2,num_speculative_tokens=2", **options))
    sizes = [(folder / "target.bin").stat().st_size for folder in (plain, both)]
    # Small constants of the second graph apart, such as masks; a matrix alone is several pages.
    assert sizes[0] <= sizes[1] < sizes[0] + 4 * 4096
    assert not (both / "draft").exists()
    with Engine.load(plain, threads=1) as loaded, Engine.load(both, threads=1) as other:
        prompt = [int(token) for token in np.random.default_rng(2).integers(3, 300, 20)]
        tokens = other.generate(prompt, GREEDY)
        assert tokens.token_ids == loaded.generate(prompt, GREEDY).token_ids
        assert tokens.stats.drafted > 0


def test_layers_it_cannot_have_are_refused(tmp_path, cli):
    target = make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=2)
    for count in (0, 2):
        with pytest.raises(BuildError, match=f"layers is {count}, but .* has 2 layers; expected fewer|>= 1"):
            build(BuildOptions(target=str(target), output=tmp_path / "out", methods=f"self_draft:{count}"))
    assert not (tmp_path / "out").exists()
    words = ["build", "--target", target, "-o", tmp_path / "out", "--max-seq-len", "128"]
    shown = cli(*words, "--self-draft-layers", "1", "--num-speculative-tokens", "2", "--ngram").words
    assert [type(method).__name__ for method in read_manifest(tmp_path / "out").methods] == ["SelfDraft", "Ngram"]
    assert "self_draft, the target's first layer: 2 draft tokens a step" in shown


def test_its_shape_points_are_checked(bundle, tmp_path):
    folder = shutil.copytree(bundle(NAME), tmp_path / "bundle")

    def narrow(document: Document) -> None:
        graph = document["methods"][0]["draft"]["graph"]
        graph["points"] = [point for point in graph["points"] if point["tokens"] < 64]

    rewritten(folder, narrow)
    with pytest.raises(Exception, match="no shape point of the self_draft has 64 tokens"):
        read_manifest(folder)
