"""MLP speculators: what is read, what is refused, that the graph proposes by the formulas, and training."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from specexport.contract import tensors
from specexport.contract.errors import BuildError, RequestError
from specexport.contract.methods import read_methods
from specexport.contract.reading import read_manifest
from specexport.contract.shapes import ShapePoint
from specexport.contract.tree import TokenTree
from specexport.exporter.build import build
from specexport.exporter.engines.compiler import compile_graph, load_library
from specexport.exporter.engines.source import model_jobs, write_source
from specexport.exporter.method import TargetInfo, exporter_of
from specexport.exporter.options import BuildOptions
from specexport.methods.mlp_speculator import MlpSpeculator, MlpSpeculatorProposer, SpeculatorTraining
from specexport.methods.mlp_speculator.export import read_speculator, trace_speculator
from specexport.methods.mlp_speculator.train import new_speculator, stage_losses
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.backend import RunShape
from specexport.runtime.proposal import SlotView
from specexport.runtime.speculative import PLAIN
from specexport.training.predictions import measure_over_hidden
from specexport.tree_search import record_proposals, set_default_tree
from specexport.verify import methods as recording
from specexport.verify.bundle import verify
from tests.checkpoints import VOCAB, changed, make_model, make_speculator
from tests.reference import draw_candidates
from tests.training import CPU, train_over, training_options, windows_of, write_words

pytestmark = pytest.mark.exporter

H, INNER, STAGES = 64, 48, 3
TREE = TokenTree.from_choices([[0], [1], [3], [0, 0], [0, 2], [1, 0], [1, 1], [0, 0, 0], [1, 0, 1], [1, 1, 0]])
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def speculators(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Callable[[bool, bool], Path]:
    """Random ones, tied or not, with their input scaled or not."""
    root, result = tmp_path_factory.mktemp("speculators"), {}

    def get(tied: bool, scaled: bool) -> Path:
        if (tied, scaled) not in result:
            folder = root / f"{tied}-{scaled}"
            result[tied, scaled] = make_speculator(folder, target, STAGES, inner=INNER, tied=tied, scale_input=scaled)
        return result[tied, scaled]

    return get


# --- the formulas -----------------------------------------------------------------------------------------------------


def said_along(folder: Path, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Logits ``[V]`` of the stage after these tokens, the root first: the published formulas, spelled out."""
    weights = {name.removeprefix("speculator."): tensor for name, tensor in stored(folder).items()}
    config = json.loads((folder / "config.json").read_text())
    mix = 0.5 ** (0.5 / config["n_predict"])
    state = hidden
    if config["scale_input"]:
        state = state / torch.sqrt((state**2).mean() + 1e-6) / math.sqrt(2)
    for stage, token in enumerate(tokens):
        part, moved = (0, min(stage, 1)) if config["tie_weights"] else (stage, stage)
        state = F.linear(state, weights[f"proj.{moved}.weight"]) * mix
        state = state + weights[f"emb.{part}.weight"][token] * math.sqrt((1 - mix**2) * config["inner_dim"] / 2)
        state = state / torch.sqrt((state**2).mean() + 1e-6)
        state = F.gelu(state * weights[f"ln.{part}.weight"] + weights[f"ln.{part}.bias"])
    return F.linear(state, weights[f"head.{part}.weight"])


class OneGraph:
    """A propose graph in a bare session, as a proposer sees a graph."""

    sizes = (1, 2)

    def __init__(self, path: Path) -> None:
        method = MlpSpeculator(trees=(), model="here", candidates=64, stages=STAGES, hidden=H)
        self._session = onnxruntime.InferenceSession(path)
        self._make = method.signature.buffers

    def drafts(self, slots: int) -> tuple[tuple[int, int], ...]:
        return ((STAGES, 1), (STAGES, TREE.level_width))

    def inputs(self, shape: RunShape) -> dict[str, Any]:
        self._given, result = self._make(shape.point(0))
        self._names = list(result)
        return self._given

    def run(self, shape: RunShape) -> dict[str, Any]:
        return dict(zip(self._names, self._session.run(self._names, self._given), strict=True))


@pytest.mark.parametrize(("tied", "scaled", "lowering"), [(True, True, "native"), (False, False, "portable")])
def test_the_graph_fills_a_tree_as_the_formulas_say(tmp_path, speculators, tied, scaled, lowering):
    """Every node's token and q, in two slots that want different trees, one greedy and one drawn."""
    folder = speculators(tied, scaled)
    outline = read_speculator(str(folder))
    outline.require_fit(hidden=H, vocab=VOCAB)
    ir.save(trace_speculator(outline.load(), lowering), tmp_path / "propose.onnx")
    proposer = MlpSpeculatorProposer(OneGraph(tmp_path / "propose.onnx"))
    states = np.random.default_rng(1).normal(0, 1.5, (2, H)).astype(np.float32)
    sampled = SamplingParams(temperature=0.8, top_k=40, top_p=0.97, min_p=0.001)
    views = [
        SlotView(0, [9, 4, 31], GREEDY, np.random.default_rng(2), TokenTree.chain(3)),
        SlotView(1, [7, 5, 200], sampled, np.random.default_rng(3), TREE),
    ]
    assert proposer.propose(views) == {}
    for view in views:
        proposer.observe(view.slot, {tensors.HIDDEN: np.stack([states[1 - view.slot], states[view.slot]])}, 1)
    proposals = proposer.propose(views)
    noise = np.random.default_rng(3).random((TREE.depth, TREE.level_width), np.float32)
    for view in views:
        proposal = proposals[view.slot]
        paths: dict[int, list[int]] = {0: [view.tokens[-1]]}
        for depth, level in enumerate(view.tree.levels):
            for at, node in enumerate(level):
                logits = said_along(folder, torch.from_numpy(states[view.slot]), paths[node]).numpy()
                ranked, q = expected(logits, view.params, float(noise[depth, at]))
                for child in view.tree.children[node]:
                    token = int(proposal.tokens[child - 1])
                    assert token == ranked[view.tree.ranks[child]]
                    paths[child] = [*paths[node], token]
                    if proposal.q is not None:
                        probs = np.zeros(VOCAB)
                        probs[proposal.q.ids[child - 1]] = proposal.q.probs[child - 1]
                        wanted = q if view.tree.ranks[child] == 0 else np.eye(VOCAB)[token]
                        np.testing.assert_allclose(probs, wanted, atol=1e-5)
        assert (proposal.q is None) == view.params.greedy
        assert proposal.candidates.shape == (view.tree.depth, 64)
        assert proposal.candidates[0, 0] == proposal.tokens[0]
    # Without the node of rank 0 at a depth, nothing is known of the candidates behind it.
    views[0].tree = TokenTree.from_choices([[1], [1, 0], [1, 0, 0]])
    proposal = proposer.propose(views[:1])[0]
    assert (proposal.candidates == proposals[0].candidates[:1]).all()
    assert proposal.tokens[0] == proposal.candidates[0, 1]


def expected(logits: npt.NDArray[np.float32], params: SamplingParams, noise: float) -> tuple[list[int], Any]:
    """Tokens by their ranks among a node's children, and q of the first."""
    if params.greedy:
        return np.argsort(-logits).tolist(), None
    token, ids, probs = (part[0] for part in draw_candidates(logits[None], np.array([noise], np.float32), params, 64))
    q = np.zeros(VOCAB)
    q[ids] = probs
    return [int(token), *(int(other) for other in ids if other != token)], q


# --- files ------------------------------------------------------------------------------------------------------------


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_tied_tensors_may_be_stored_once_or_per_stage(tmp_path, speculators):
    folder = speculators(True, False)
    once = stored(folder)
    names = ("emb.0.weight", "proj.0.weight", "proj.1.weight", "head.0.weight", "ln.0.weight", "ln.0.bias")
    assert set(once) == {f"speculator.{name}" for name in names}
    repeated = {
        name.replace(".0.", f".{at}."): tensor.clone()
        for name, tensor in once.items()
        if "proj" not in name
        for at in range(STAGES)
    }
    repeated |= {f"proj.{at}.weight": once[f"speculator.proj.{min(at, 1)}.weight"].clone() for at in range(STAGES)}
    # Sharded, and some without the prefix: what older conversions left.
    halves = list(repeated.items())
    for number in (0, 1):
        save_file(dict(halves[number::2]), tmp_path / f"model-{number}.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    first, second = (read_speculator(str(source)).load().state_dict() for source in (folder, tmp_path))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(first["emb.2.weight"], once["speculator.emb.0.weight"])
    repeated["speculator.ln.1.bias"] += 1
    save_file(repeated, tmp_path / "model-0.safetensors")
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(BuildError, match=r"tie_weights is true, but 'speculator.ln.1.bias' and .* differ"):
        read_speculator(str(tmp_path)).load()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "medusa"}, r"config\.json: not a configuration of an MLP speculator: .*model_type"),
        ({"n_predict": 2}, r"top_k_tokens_per_head is \[5, 4, 3\] and n_predict 2; expected a width for each stage"),
        ({"n_predict": 2, "top_k_tokens_per_head": [2, 2]}, r"'speculator.emb.2.weight' is not part of"),
        ({"n_predict": 4, "top_k_tokens_per_head": [2] * 4}, r"no tensor 'speculator.emb.3.weight'; .* of 4 stages"),
        ({"n_predict": 17}, "n_predict"),
        ({"n_predict": "three"}, "n_predict"),
        ({"inner_dim": 0}, r"'speculator.emb.0.weight' is \[3\d\d, 48\], expected \[3\d\d, 64\] in .* vocab_size"),
        ({"emb_dim": 32}, r"emb_dim is 32, and the target's is 64; this speculator was trained for another model"),
        ({"vocab_size": 4096}, r"vocab_size is 4096, and the target's is 3\d\d"),
        ({"top_k_tokens_per_head": [0, 1, 1]}, "top_k_tokens_per_head"),
        ({"head_accuracy": [[0.5]], "path_accuracy": []}, "expected shares of 3 stages"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(tmp_path, speculators, change, reason):
    folder = changed(copytree(speculators(False, False), tmp_path / "speculator"), **change)
    with pytest.raises(BuildError, match=reason) as caught:
        read_speculator(folder).require_fit(hidden=H, vocab=VOCAB)
    assert folder in str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"proj.1.weight": torch.zeros(48, 64)}, r"'speculator.proj.1.weight' is \[48, 64\], expected \[48, 48\]"),
        ({"ln.0.bias": None}, "no tensor 'speculator.ln.0.bias'"),
        ({"lm_head.weight": torch.zeros(2)}, "'speculator.lm_head.weight' is not part of a speculator of 3 stages"),
        ({"head.2.weight": torch.full((VOCAB, 48), torch.inf)}, "'speculator.head.2.weight' holds numbers that"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, speculators, change, reason):
    folder = copytree(speculators(False, False), tmp_path / "speculator")
    changed(folder, {f"speculator.{name}": tensor for name, tensor in change.items()})
    with pytest.raises(BuildError, match=reason):
        outline = read_speculator(str(folder))
        outline.require_fit(hidden=H, vocab=VOCAB)
        outline.load()


def test_pickles_and_broken_files_are_refused(speculators, tmp_path):
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(BuildError, match="not a configuration of an MLP speculator"):
        read_speculator(str(tmp_path))
    (tmp_path / "config.json").write_bytes((speculators(False, False) / "config.json").read_bytes())
    with pytest.raises(BuildError, match=r"pytorch_model\.bin: refused: only plain tensors"):
        read_speculator(str(tmp_path)).require_fit(hidden=H, vocab=VOCAB)
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(BuildError, match="not a configuration of an MLP speculator"):
        read_speculator(str(tmp_path))
    config = {"model_type": "mlp_speculator", "vocab_size": VOCAB, "emb_dim": H, "n_predict": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BuildError, match="not a safetensors file"):
        read_speculator(str(tmp_path)).require_fit(hidden=H, vocab=VOCAB)


# --- trees ------------------------------------------------------------------------------------------------------------


def planned(folder: Path, **options: Any) -> list[list[tuple[int, ...]]]:
    (method,) = read_methods({"method": "mlp_speculator", "model": str(folder), **options})
    result = exporter_of(method).plan(method, TargetInfo(VOCAB, 1, 2, H, folder, "fp32", 64))
    return [sorted(tree.choices) for tree in result.token_trees()]


def test_trees_have_the_checkpoints_widths(tmp_path, speculators):
    folder = copytree(speculators(False, False), tmp_path / "speculator")
    changed(folder, top_k_tokens_per_head=[3, 2, 1])
    assert planned(folder) == [[(0,), (0, 0), (0, 0, 0), (1,)]]
    whole = [(a, *rest) for a in range(3) for rest in ((), (0,), (1,), (0, 0), (1, 0))]
    assert planned(folder, num_speculative_tokens=15) == [sorted(whole)]
    with pytest.raises(BuildError, match=r"is 16, and the widest tree of .* has 15: its top_k_tokens_per_head is"):
        planned(folder, num_speculative_tokens=16)
    wide = TokenTree.from_choices([[63], [63, 63]])
    assert planned(folder, trees=(wide,)) == [[(63,), (63, 63)]]
    for tree, reason in (
        (TokenTree.chain(5), "cannot be filled: depth 4, with 3 stages"),
        (TokenTree.from_choices([[64]]), "cannot be filled: rank 64, with 64 candidates"),
    ):
        with pytest.raises(BuildError, match=reason):
            planned(folder, trees=(tree,))
    changed(folder, top_k_tokens_per_head=[1, 1, 1])
    assert planned(folder) == [[(0,), (0, 0), (0, 0, 0)]]
    measured = {"head_accuracy": [[0.5, 0.4]] * 3, "path_accuracy": [[[0], 0.5], [[1], 0.4], [[1, 0], 0.3]]}
    changed(folder, top_k_tokens_per_head=[2, 2, 2], **measured)
    assert planned(folder, num_speculative_tokens=3) == [[(0,), (1,), (1, 0)]]
    assert len(planned(folder)[0]) == 4


# --- bundles ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quantized(
    tmp_path_factory: pytest.TempPathFactory, target: Path, speculators: Callable[[bool, bool], Path]
) -> Path:
    """A bundle for two slots with a speculator in int8, its stages tied."""
    out = tmp_path_factory.mktemp("quantized") / "bundle"
    methods = {"method": "mlp_speculator", "model": str(speculators(True, True)), "trees": [TREE]}
    return build(BuildOptions(str(target), out, methods, max_seq_len=128, max_batch_size=2, block_size=16))


def test_its_engine_is_compiled(quantized, tmp_path):
    """One, of all stages, for steps of one slot and of several."""
    folder = copytree(quantized, tmp_path / "bundle")
    manifest = read_manifest(folder)
    model = manifest.models["speculator"]
    (job,) = model_jobs(model, manifest, manifest.batch_sizes, plain=False)
    assert job.profiles == tuple(ShapePoint(slots, TREE.level_width, 0, 0, STAGES) for slots in (1, 2))
    master = folder / model.graph.master
    source = master.with_name("propose.fp16.onnx")
    write_source(master, source, "fp16", job.drafts, job.fixed, compiled=True)
    graph = onnx.load(source, load_external_data=False).graph
    kinds = {initializer.name: initializer.data_type for initializer in graph.initializer}
    tables = [kinds[node.input[0]] for node in graph.node if node.op_type == "Gather" and node.input[0] in kinds]
    assert onnx.TensorProto.FLOAT16 in tables and onnx.TensorProto.INT8 not in tables
    library, engine = load_library("tensorrt-rtx"), folder / "engine"
    report = compile_graph(source, engine, job.sizes, library, ((8, 9),))
    assert report.profiles == len(job.profiles)
    assert report.size == engine.stat().st_size > 1000


def test_bundle_text_equals_the_checkpoints(quantized, tmp_path, speculators, monkeypatch):
    folder, out = speculators(True, True), quantized
    report = verify(out, prompts=("the words of a text", "other words"), max_tokens=8)
    assert report.verdict == "passed", report
    (check,) = (check for check in report.checks if check.name == "mlp_speculator")
    assert check.numbers["positions"] >= 24
    # What stages share is stored once, though each multiplies an int8 matrix of its own.
    manifest = read_manifest(out)
    (method,) = manifest.methods
    size = (out / "speculator.bin").stat().st_size
    assert size == method.memory({file.path: file.size for file in manifest.files}, 128)
    assert size < (2 * VOCAB + H + INNER) * INNER * 1.25 + 4096 * 16
    model = onnx.load(out / "speculator.onnx", load_external_data=False)
    integers = [
        initializer for initializer in model.graph.initializer if initializer.data_type == onnx.TensorProto.INT8
    ]
    assert len(integers) == 3 * STAGES
    negated = {name: -tensor for name, tensor in stored(folder).items()}
    other = {"mlp_speculator.model": changed(copytree(folder, tmp_path / "other"), negated)}
    checks = verify(out, sources=other, prompts=("the words of a text",), max_tokens=4).checks
    assert [check.name for check in checks if check.passed is False] == ["mlp_speculator"]
    monkeypatch.setattr(recording, "_RECORDED_STEPS", 1)  # as in a context of three tokens, nothing is drafted
    checks = verify(out, prompts=("the words",), max_tokens=4).checks
    assert [check.name for check in checks if check.passed is None] == ["mlp_speculator"]


def test_a_bundle_gets_another_tree(tmp_path, bundle):
    """One that is as deep as another and as wide as a third needs shapes of its own."""
    out = copytree(bundle("qwen3-mlp"), tmp_path / "bundle")
    before = set(read_manifest(out).models["speculator"].graph.points)
    wide = TokenTree.from_choices([*([rank] for rank in range(6)), *([rank, 0] for rank in range(6))])
    manifest = set_default_tree(out, "mlp_speculator", wide)
    after = set(manifest.models["speculator"].graph.points)
    assert {(point.tokens, point.drafts) for point in after - before} >= {(6, 2), (6, 3)}
    with Engine.load(out, threads=1) as engine:
        plain = engine.generate([5, 9, 17], GREEDY, PLAIN)
        done = engine.generate([5, 9, 17], GREEDY, "mlp_speculator")
        assert done.token_ids == plain.token_ids
        assert done.stats.drafted == 12 * done.stats.steps_with_draft
        # What its proposals cost is measured from any state, which is forgotten then.
        with record_proposals(engine, "mlp_speculator") as result:
            (costs,) = engine.calibrate(seconds=0.1).methods
        assert {len(proposal.tree) for _, proposal in result} == {cost.tokens for cost in costs.propose}
        view = SlotView(0, [5, 9], GREEDY, np.random.default_rng(0), wide)
        assert engine.proposers["mlp_speculator"].propose([view]) == {}
    assert verify(out, prompts=("the words",), max_tokens=4).passed


def test_build_inspect_and_refusals(tmp_path, target, speculators, bundle, cli):
    out = tmp_path / "bundle"
    words = ["build", "--target", str(target), "--mlp-speculator", str(speculators(False, False)), "-o", str(out)]
    sizes = ["--max-seq-len", "128", "--max-batch-size", "1", "--tree", str(tmp_path / "flat.json")]
    (tmp_path / "flat.json").write_text("[[0], [1], [0, 0], [0, 1], [1, 0]]")
    shown = cli(*words, *sizes, "--precision", "int8", "--lowering", "portable").words
    # Of three stages, those that the tree has levels for.
    assert "mlp_speculator, 2 stages: 5 draft tokens a step in a tree of depth 2" in shown
    report = verify(out, prompts=("the words of a text", "other words"), max_tokens=4)
    (check,) = (check for check in report.checks if check.name == "mlp_speculator")
    assert check.passed, check
    assert check.numbers["positions"] >= 12
    printed = cli(*words[:-1], tmp_path / "no", "--tree", "mc_sim_7b_63", status=1)
    assert "cannot be filled: depth 4, with 3 stages" in printed.err
    assert not (tmp_path / "no").exists()
    with pytest.raises(RequestError, match=r"mlp_speculator.model was given, but .* was built without it"):
        verify(bundle("qwen3-medusa"), sources={"mlp_speculator.model": str(speculators(False, False))})


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def options(target: Path, tmp_path: Path) -> Callable[..., SpeculatorTraining]:
    return partial(training_options, "mlp_speculator", target, tmp_path)


@pytest.mark.slow
def test_stages_learn_the_next_token(tmp_path, options):
    """In a language in which either of two tokens follows each: who does not see it must guess among four, or eight."""
    model: Any = make_model("llama")
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(40, (96, 24), generator=generator)
    for at in range(1, 24):
        ids[:, at] = (ids[:, at - 1] + 7 + 12 * torch.randint(2, (96,), generator=generator)) % 40
    ids += 100
    windows = windows_of(ids)
    torch.manual_seed(0)
    speculator = new_speculator(options(n_predict=3, inner_dim=64, tie_weights=True, scale_input=True), model)
    trained = train_over(
        speculator, partial(stage_losses, speculator), model, windows,
        tmp_path / "stages.pt", steps=120, batch_size=24, lr=5e-3,
    )  # fmt: skip
    losses = partial(stage_losses, speculator)
    accuracy = measure_over_hidden(losses, len(speculator), model, windows, CPU)
    assert all(sum(row[:2]) > 0.9 for row in accuracy.ranks), accuracy.ranks
    chain = sum(accuracy.paths[(0,) * depth] for depth in (1, 2, 3))
    assert accuracy.chain_length == pytest.approx(1 + chain)
    assert chain > 0.7
    assert len(trained.history[-1]["top-1"]) == 3


@pytest.mark.slow
def test_the_command_prints_the_record(target, tmp_path, cli):
    words = ["train", "mlp-speculator", "--target", str(target), "--data", str(write_words(tmp_path))]
    record = cli(*words, "--seq-len", "32", "--steps", "3", "--n-predict", "2", "-o", tmp_path / "o", "--json").json
    assert [entry["step"] for entry in record["data"]["history"]] == [3]
    assert len(record["stage_accuracy"]) == 2
