"""Medusa heads: what is read, what is refused, that graphs propose what the heads do, and training."""

import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from specexport.contract.errors import BuildError, RequestError, SpecExportError, TrainError
from specexport.contract.reading import read_manifest
from specexport.contract.tree import TokenTree
from specexport.exporter.build import build
from specexport.exporter.checkpoints.accuracy import HeadAccuracy
from specexport.exporter.checkpoints.checkpoint import load_checkpoint
from specexport.exporter.options import BuildOptions
from specexport.graphs.layers import hidden_and_logits
from specexport.methods.medusa import MedusaTraining
from specexport.methods.medusa.export import COMPATIBLE, read_medusa, save_medusa
from specexport.methods.medusa.graph import MedusaHeads
from specexport.methods.medusa.train import head_losses, new_heads, train_medusa
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.speculative import PLAIN
from specexport.training.predictions import measure_over_hidden
from specexport.verify.bundle import verify
from tests.checkpoints import FAMILIES, VOCAB, changed, make_checkpoint, make_heads, make_model
from tests.training import CPU, LANGUAGE, silent, train_over, training_options, windows_of, write_words

pytestmark = pytest.mark.exporter

H, V, HEADS = 64, VOCAB, 3
ACCURACY = HeadAccuracy(
    [[0.6, 0.2, 0.1], [0.5, 0.3, 0.05], [0.1, 0.1, 0.1]],
    {(0,): 0.6, (0, 0): 0.5, (1,): 0.2, (0, 1): 0.05, (1, 1): 0.1, (2,): 0.1, (0, 0, 0): 0.02},
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def random_heads(layers: int, *, tied: bool, seed: int = 0) -> MedusaHeads:
    medusa = MedusaHeads(HEADS, layers, H, V, tied=tied)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in medusa.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return medusa


def logits(heads: MedusaHeads, lm_head: torch.Tensor) -> torch.Tensor:
    last = torch.nn.Linear(H, V, bias=False)
    with torch.no_grad():
        last.weight.copy_(lm_head)
        return heads.logits(torch.linspace(-1, 1, 5 * H).reshape(5, H), last)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
@pytest.mark.parametrize("layers", [1, 2])
def test_written_files_are_read_back(tmp_path, layers, tied):
    heads, lm_head = random_heads(layers, tied=tied), torch.randn(V, H)
    tree = [[0], [1], [0, 0]]
    save_medusa(tmp_path, heads, lm_head, base="x", accuracy=ACCURACY)
    outline = read_medusa(Path(changed(tmp_path, medusa_choices=tree)))
    assert (outline.count, outline.layers, outline.tied) == (HEADS, layers, tied)
    assert outline.tree == TokenTree.from_choices(tree)
    assert outline.accuracy == ACCURACY
    expected = logits(heads, lm_head)
    ours, theirs = (read_medusa(folder).load(hidden=H, vocab=V) for folder in (tmp_path, tmp_path / "fasterdecoding"))
    torch.testing.assert_close(logits(ours, lm_head), expected)
    assert not theirs.tied
    torch.testing.assert_close(logits(theirs, lm_head), expected, atol=1e-4, rtol=1e-4)


def fasterdecoding(folder: Path, **config: Any) -> dict[str, torch.Tensor]:
    """A checkpoint as ``FasterDecoding/Medusa`` leaves it, and its tensors."""
    folder.mkdir(exist_ok=True)
    state = {name: tensor.clone() for name, tensor in random_heads(1, tied=False).state_dict().items()}
    settings = {"medusa_num_heads": HEADS, "medusa_num_layers": 1, "base_model_name_or_path": "a/b", **config}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return state


def test_all_heads_of_a_file_are_used(tmp_path):
    """Published configurations name fewer heads than were trained, which FasterDecoding's own code corrects."""
    torch.save(fasterdecoding(tmp_path, medusa_num_heads=2), tmp_path / "medusa_lm_head.pt")
    assert len(read_medusa(tmp_path).load(hidden=H, vocab=V)) == HEADS


def test_a_full_model_with_heads(tmp_path):
    model = make_checkpoint(tmp_path / "model", "llama")
    heads = fasterdecoding(tmp_path / "heads")
    added = {f"medusa_head.{name}": tensor for name, tensor in heads.items()}
    changed(model, added, medusa_num_heads=HEADS, medusa_num_layers=1)
    loaded = read_medusa(model).load(hidden=H, vocab=V)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, heads[name])
    build(BuildOptions(target=str(model), methods=f"medusa:{model}", output=tmp_path / "bundle", max_seq_len=128))
    assert verify(tmp_path / "bundle", prompts=("some of the words",), max_tokens=8).verdict == "passed"


class Evil:
    """Unpickling it would run code."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("raise SystemExit('code was run')",)


def without(name: str) -> Any:
    return lambda state: state.pop(name)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s.update({"0.0.linear.weight": torch.zeros(H, H + 1)}), r"'0.0.linear.weight' is \[64, 65\], expec"),
        (lambda s: s.update({"1.1.weight": torch.zeros(V + 4, H)}), r"'1.1.weight' is \[324, 64\], expected \[3\d\d"),
        (without("2.1.weight"), "no tensor '2.1.weight'"),
        (without("0.0.linear.bias"), "no tensor '0.0.linear.bias'"),
        (lambda s: s.update({"lm_head.weight": torch.zeros(2, 2)}), "'lm_head.weight' is not part of Medusa heads"),
        (lambda s: s.update({key: s[key].int() for key in [*s][:1]}), "holds no floating-point numbers"),
        (lambda s: s["1.0.linear.bias"].fill_(torch.nan), "'1.0.linear.bias' holds numbers that are not finite"),
    ],
)
@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, change, reason, kind):
    state = fasterdecoding(tmp_path)
    change(state)
    file = tmp_path / f"medusa_lm_head.{kind}"
    torch.save(state, file) if kind == "pt" else save_file(state, file)
    with pytest.raises(BuildError, match=reason) as caught:
        read_medusa(tmp_path).load(hidden=H, vocab=V)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (pickle.dumps({"0.0.linear.weight": Evil()}), "refused: only plain tensors"),
        (b"not a pickle", "refused: only plain tensors"),
        (b"", "refused: only plain tensors"),
        ({"0.0.linear.weight": Evil()}, "could run code"),
        ([torch.zeros(2)], "holds list; expected a dictionary of tensors"),
    ],
)
def test_files_with_code_are_refused(tmp_path, content, reason):
    """Pickles, and torch's files of them."""
    fasterdecoding(tmp_path)
    file = tmp_path / "medusa_lm_head.pt"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    with pytest.raises(BuildError, match=reason):
        read_medusa(tmp_path).load(hidden=H, vocab=V)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"medusa_num_heads": 4}, "medusa_num_heads is 4, but .* holds 3 heads"),
        ({"medusa_num_heads": 0}, "0 heads of 1 layers"),
        ({"medusa_num_layers": 2}, "no tensor '0.1.linear.bias'"),
        ({"medusa_num_heads": "three"}, "not a configuration of Medusa heads: .*medusa_num_heads"),
        ({"medusa_choices": [[0, 0]]}, r"medusa_choices: the choice \[0, 0\] is listed without"),
        ({"medusa_choices": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}, "medusa_choices go 4 deep, with 3 heads"),
        ({"head_accuracy": [[0.5]], "path_accuracy": []}, "expected shares of 3 heads"),
        ({"head_accuracy": [], "path_accuracy": [[[0], 1.5]]}, "path_accuracy"),
        ({"tie_lm_head": True}, r"'0.1.weight' is \[3\d\d, 64\], expected \[64, 64\]"),
    ],
)
def test_a_wrong_configuration_is_refused(tmp_path, config, reason):
    save_file(fasterdecoding(tmp_path, **config), tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(BuildError, match=reason):
        read_medusa(tmp_path).load(hidden=H, vocab=V)


def test_folders_without_heads_are_refused(tmp_path):
    with pytest.raises(BuildError, match="no such folder"):
        read_medusa(tmp_path / "gone").load(hidden=H, vocab=V)
    with pytest.raises(BuildError, match="no Medusa heads"):
        read_medusa(make_checkpoint(tmp_path / "model", "llama")).load(hidden=H, vocab=V)
    (tmp_path / "cut").mkdir()
    fasterdecoding(tmp_path / "cut")
    (tmp_path / "cut" / "medusa_lm_head.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(BuildError, match="not a safetensors file"):
        read_medusa(tmp_path / "cut").load(hidden=H, vocab=V)


# --- building ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("checkpoints")
    target = make_checkpoint(root / "target", "qwen3", calm=True)
    return {
        "target": str(target),
        "heads": str(make_heads(root / "heads", target, HEADS, tied=False)),
        "tied": str(make_heads(root / "tied", target, HEADS, tied=True)),
    }


@pytest.fixture
def built(tmp_path: Path, checkpoints: dict[str, str]) -> Callable[..., Path]:
    """Builds a bundle of the target with methods."""

    def make(*methods: Any, name: str = "bundle", **options: Any) -> Path:
        return build(BuildOptions(checkpoints["target"], tmp_path / name, methods, **{"max_seq_len": 128} | options))

    return make


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "int4"])
@pytest.mark.parametrize("heads", ["heads", "tied"])
def test_graphs_propose_the_heads_candidates(built, checkpoints, heads, precision):
    out = built(f"medusa:{checkpoints[heads]}", max_seq_len=256, precision=precision)
    report = verify(out, prompts=("the words of a text", "other words"), max_tokens=16)
    assert report.verdict == "passed", report
    (check,) = (check for check in report.checks if check.name == "medusa")
    assert check.numbers["positions"] >= 24


def test_heads_are_stored_in_fewer_bits_than_an_exact_target(built, tmp_path, checkpoints):
    for precision in ("int8", "fp32"):
        out = built(f"medusa:{checkpoints['tied']}", name=precision, draft_precision=precision)
        model = onnx.load(out / "target.onnx", load_external_data=False)
        integers = [
            initializer for initializer in model.graph.initializer if initializer.data_type == onnx.TensorProto.INT8
        ]
        # Each head's block and projection, and the copy of the model's own head; never the model.
        assert len(integers) == (0 if precision == "fp32" else 1 + HEADS + 1)
        medusa = read_manifest(out).method("medusa")
        assert medusa.weights == precision
    plain = [
        Engine.load(tmp_path / precision).generate([7, 8, 9], GREEDY, PLAIN).token_ids for precision in ("int8", "fp32")
    ]
    assert plain[0] == plain[1]


def test_sizes_make_the_trees_that_suit_the_heads(built, tmp_path):
    heads = random_heads(1, tied=True)
    save_medusa(tmp_path / "heads", heads, torch.zeros(V, H), base="x", accuracy=ACCURACY)
    medusa = {"method": "medusa", "model": str(tmp_path / "heads"), "num_speculative_tokens": [4, 1, 7]}
    (method,) = read_manifest(built(medusa)).methods
    assert [sorted(choices) for choices in method.trees] == [
        [(0,), (0, 0), (1,), (2,)],
        [(0,)],
        [(0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 1), (2,)],
    ]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"trees": ("mc_sim_7b_63",)}, "cannot be filled: depth 4, with 3 heads"),
        ({"trees": (TokenTree.from_choices([[10]]),)}, "cannot be filled: rank 10, with 10 candidates"),
        ({"trees": (TokenTree.chain(2), TokenTree.from_choices([[1]]))}, "two trees have 1 draft tokens"),
        ({"trees": (TokenTree.chain(1),)}, "has no draft token"),
        ({"trees": ("nowhere.json",)}, "nowhere.json: no such file, and no preset"),
    ],
)
def test_invalid_head_options_are_refused(built, tmp_path, checkpoints, options, reason):
    with pytest.raises(BuildError, match=reason):
        built({"method": "medusa", "model": checkpoints["heads"], **options})
    assert list(tmp_path.iterdir()) == []


def test_thresholds_out_of_range_are_refused():
    with pytest.raises(BuildError, match=r"posterior_alpha is 2\.0"):
        BuildOptions(target="x", output=Path("y"), posterior_alpha=2.0)


# --- decoding ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, str]) -> Path:
    """A bundle with a draft and heads, and a tree of 64 nodes: as wide as a prefill chunk."""
    out = tmp_path_factory.mktemp("both") / "bundle"
    wide = TokenTree.best(lambda path: 0.5 ** sum(rank + 1 for rank in path), 64, 8, HEADS)
    target, trees = checkpoints["target"], [TokenTree.from_choices([[0], [1], [0, 0]]), wide]
    methods = (f"draft_model:{target}", {"method": "medusa", "model": checkpoints["heads"], "trees": trees})
    options = BuildOptions(target, out, methods, max_seq_len=160, posterior_threshold=0.0, posterior_alpha=0.0)
    return build(options)


def test_requests_choose_a_method_and_a_tree(both):
    with Engine.load(both) as engine:
        assert list(engine.methods)[:2] == ["draft_model", "medusa"]
        plain = engine.generate([9, 8, 7], GREEDY, PLAIN)
        choices = (("draft_model", None), ("draft_model", 4), ("medusa", None), ("medusa", 3), ("medusa", 63))
        for method, size in choices:
            done = engine.generate([9, 8, 7], GREEDY, {"method": method, "num_speculative_tokens": size})
            assert done.token_ids == plain.token_ids
            assert done.stats.drafted == (size or {"draft_model": 4, "medusa": 3}[method]) * done.stats.steps_with_draft
        with pytest.raises(RequestError, match="method is 'lookahead'; the bundle has draft_model, medusa"):
            engine.generate([9], GREEDY, "lookahead")
        with pytest.raises(RequestError, match="num_speculative_tokens is 4; the bundle was built for 3, 63"):
            engine.generate([9], GREEDY, {"method": "medusa", "num_speculative_tokens": 4})


def test_wide_trees_reach_the_end_of_the_context(both):
    with Engine.load(both) as engine:
        for length in (1, 2, 100, 159):
            prompt = [3 + i % 200 for i in range(length)]
            wanted = engine.generate(prompt, GREEDY.replace(max_tokens=400), PLAIN)
            completion = engine.generate(
                prompt, GREEDY.replace(max_tokens=400), {"method": "medusa", "num_speculative_tokens": 63}
            )
            assert completion.token_ids == wanted.token_ids
            assert len(prompt) + len(completion.token_ids) == 160


def test_requests_default_to_the_bundles_thresholds(both):
    """At zero, everything that is possible at all is accepted."""
    with Engine.load(both) as engine:
        typical = SamplingParams(temperature=1.0, acceptance="typical", max_tokens=40, seed=3, ignore_eos=True)
        free = engine.generate([5, 6], typical, "draft_model")
        assert free.stats.acceptance_rate == 1.0
        strict = engine.generate([5, 6], typical.replace(posterior_threshold=1.0, posterior_alpha=1.0), "medusa")
        assert strict.stats.acceptance_rate < 1.0
        assert np.isfinite(strict.stats.acceptance_length)


# --- the command line -------------------------------------------------------------------------------------------------


def test_build_run_and_inspect(tmp_path, checkpoints, cli):
    tree, out = tmp_path / "tree.json", tmp_path / "bundle"
    tree.write_text("[[0], [1], [0, 0], [0, 0, 0]]")
    models = ("--target", checkpoints["target"], "--medusa", checkpoints["heads"])
    words = [*models, "-o", str(out), "--max-seq-len", "128"]
    shown = cli("build", *words, "--tree", tree, "--num-speculative-tokens", "2,6").words
    assert "medusa, 3 heads" in shown
    assert "4 draft tokens a step in a tree of depth 3, verified 5 at a time" in shown
    assert "requests may choose 2, 6" in shown
    assert "5 nodes with the root, depth 3, 2 paths" in cli("inspect", out, "--tree", "--method", "medusa").out
    run = ["run", str(out), "--prompt", "the words", "-n", "20", "--json", "--ignore-eos", "--no-calibrate"]
    ways = (["--no-speculation"], ["--method", "medusa"], ["--num-speculative-tokens", "6"])
    texts = [cli(*run, *way).json["token_ids"] for way in ways]
    assert texts[0] == texts[1] == texts[2]
    for wrong, reason in (
        ("run --prompt x --method draft_model", "method is 'draft_model'; the bundle has medusa"),
        ("inspect --tree --method draft_model", "--method is 'draft_model'; the bundle has medusa"),
        ("inspect --method medusa", "--method was given without --tree"),
    ):
        command, *flags = wrong.split()
        assert reason in cli(command, out, *flags, status=2).err


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def options(target: Path, tmp_path: Path) -> Callable[..., MedusaTraining]:
    return partial(training_options, "medusa", target, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_read_the_language_model_heads_input(family):
    model: Any = make_model(family)
    ids = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    rows = torch.rand(2, 12, generator=torch.Generator().manual_seed(1)) < 0.5
    with torch.no_grad():
        hidden, logits = hidden_and_logits(model, ids, rows)
        whole = model(input_ids=ids, use_cache=False).logits
        alone, _ = hidden_and_logits(model, ids)
    assert hidden.shape == (2, 12, model.get_output_embeddings().weight.shape[1])
    torch.testing.assert_close(logits, whole[rows], rtol=1e-4, atol=1e-4)
    assert torch.equal(hidden, alone)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
def test_heads_learn_a_language_over_a_model_that_stays_as_it_was(tmp_path, tied):
    model: Any = make_model("llama")
    windows = windows_of(LANGUAGE)
    heads = new_heads(4, 1, model, tied=tied)
    lm_head = model.get_output_embeddings()
    trained = train_over(
        heads, lambda hidden, batch: head_losses(heads, hidden, batch, lm_head), model, windows,
        tmp_path / "heads.pt", steps=150, batch_size=8, lr=1e-2,
    )  # fmt: skip
    losses = partial(head_losses, heads, lm_head=lm_head)
    accuracy = measure_over_hidden(losses, len(heads), model, windows, CPU)
    assert all(row[0] > 0.9 for row in accuracy.ranks), accuracy
    assert all(len(row) == 10 and sum(row) <= 1 + 1e-6 for row in accuracy.ranks)
    assert accuracy.paths[0, 0, 0, 0] > 0.8
    for path, share in accuracy.paths.items():
        assert share <= accuracy.ranks[len(path) - 1][path[-1]] * 1.2
        assert len(path) == 1 or share <= accuracy.paths[path[:-1]]
    assert len(trained.history[-1]["top-1"]) == 4


@pytest.mark.slow
def test_work_of_another_training_and_what_is_not_a_checkpoint_are_refused(options, tmp_path):
    work = tmp_path / "kept"
    train_medusa(options(work=work), silent)
    with pytest.raises(TrainError, match=r"kept: .* with lr 0\.001, not 0\.002.*--work"):
        train_medusa(options(output=tmp_path / "second", work=work, lr=2e-3), silent)
    checkpoint = work / "heads.pt"
    whole = torch.load(checkpoint, weights_only=True)
    whole["parameters"]["0.0.linear.bias"] = torch.zeros(3)
    for content, expected in (
        (pickle.dumps(print, protocol=2), r"heads\.pt: no checkpoint of a training .*delete it"),
        (checkpoint.read_bytes()[:1000], r"heads\.pt: no checkpoint of a training"),
        (whole, r"heads\.pt: '0\.0\.linear\.bias' is \[3\], expected \[64\]"),
        ({**whole, "step": 999}, r"heads\.pt: 6 parameters after 999 steps; expected 6, and at most 6"),
        ({**whole, "optimizers": "x"}, r"heads\.pt: optimizers is str, expected list"),
    ):
        if isinstance(content, bytes):
            checkpoint.write_bytes(content)
        else:
            torch.save(content, checkpoint)
        with pytest.raises(TrainError, match=expected):
            train_medusa(options(output=tmp_path / "second", work=work), silent)
    assert not (tmp_path / "second").exists()
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(TrainError, match="stranger: exists and is no work folder"):
        train_medusa(options(output=tmp_path / "second", work=stranger), silent)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
def test_cached_states_train_the_same_heads_which_read_back_the_same_in_both_forms(options, tmp_path, tied):
    streamed = options(tie_lm_head=tied)
    cached = options(tie_lm_head=tied, output=tmp_path / "cached", cache_hidden=True)
    record = train_medusa(streamed, silent)
    train_medusa(cached, silent)
    name = "medusa_lm_head.safetensors"
    assert (streamed.output / name).read_bytes() == (cached.output / name).read_bytes()

    base = load_checkpoint(streamed.target)
    native = read_medusa(streamed.output).load(hidden=64, vocab=VOCAB)
    theirs = read_medusa(streamed.output / COMPATIBLE).load(hidden=64, vocab=VOCAB)
    assert (native.tied, theirs.tied) == (tied, False)
    hidden, head = torch.randn(5, 64), base.model.get_output_embeddings()
    torch.testing.assert_close(native.logits(hidden, head), theirs.logits(hidden, head), rtol=1e-2, atol=2e-2)
    outline = read_medusa(streamed.output)
    torch.testing.assert_close(
        torch.tensor(outline.accuracy.ranks), torch.tensor(record["head_accuracy"]), atol=1e-5, rtol=0
    )
    assert json.loads((streamed.output / "training.json").read_text()) == record


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
@pytest.mark.parametrize("tune", ["lora", "full"])
def test_a_model_trained_with_its_heads_is_read_as_model_and_as_heads(options, tune, tied):
    settings = {"stage": 2, "tune": tune, "tie_lm_head": tied, "self_distill": 16, "base_lr": 1e-3, "steps": 8}
    changed_options = options(**settings)
    record = train_medusa(changed_options, silent)
    before, after = load_checkpoint(changed_options.target), load_checkpoint(str(changed_options.output))
    pairs = zip(before.model.named_parameters(), after.model.parameters(), strict=True)
    moved = [name for (name, old), new in pairs if not torch.equal(old, new)]
    assert moved
    # The model is held to what it said before.
    divergences = [entry["lm kl"][0] for entry in record["joint"]["history"]]
    assert all(0 <= value < 0.05 for value in divergences), divergences
    heads = read_medusa(changed_options.output).load(hidden=64, vocab=VOCAB)
    assert len(heads) == 2
    assert heads.tied is tied
    assert (changed_options.output / COMPATIBLE).exists() is tied


@pytest.mark.slow
def test_the_command_prints_accuracies_or_the_record(target, tmp_path, cli):
    data = str(write_words(tmp_path))
    words = ["train", "medusa", "--target", str(target), "--data", data, "--steps", "2", "--seq-len", "32"]
    record = cli(*words, "--tie-lm-head", "-o", tmp_path / "a", "--json").json
    assert record["options"]["tie_lm_head"] is True
    assert len(record["head_accuracy"]) == 4
    assert [entry["step"] for entry in record["heads"]["history"]] == [2]
    printed = cli(*words, "-o", tmp_path / "a", status=2)
    assert "exists already; choose another folder or pass --overwrite" in printed.err
    assert "4 heads" in cli(*words, "-o", tmp_path / "a", "--overwrite").words


@pytest.mark.slow
def test_heads_of_another_shape_are_refused_by_name(options):
    settings = options()
    train_medusa(settings, silent)
    file = settings.output / "medusa_lm_head.safetensors"
    save_file(load_file(file) | {"1.0.linear.bias": torch.zeros(7)}, file)
    with pytest.raises(SpecExportError, match=r"medusa_lm_head\.safetensors: tensor '1\.0\.linear\.bias' is \[7\]"):
        read_medusa(settings.output).load(hidden=64, vocab=VOCAB)
