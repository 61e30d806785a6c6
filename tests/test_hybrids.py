"""Layers without attention: what transformers computes, however the text is cut into steps, and back again."""

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5

from specexport.contract import signature, tensors
from specexport.contract.errors import BackendError, BuildError, BundleError
from specexport.contract.model import CELL, Recurrence, StateLayer, with_rows
from specexport.contract.reading import read_manifest
from specexport.contract.tree import TokenTree
from specexport.exporter.build import build
from specexport.exporter.checkpoints import parity
from specexport.exporter.checkpoints.checkpoint import load_checkpoint
from specexport.exporter.engines.bundle import compile_bundle
from specexport.exporter.engines.compiler import compile_graph, load_library
from specexport.exporter.engines.source import write_source
from specexport.exporter.options import BuildOptions, CompileOptions
from specexport.exporter.plan import DEVICES, plan
from specexport.graphs.recurrent import StepStates, Updates
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.backend import BackendOptions, open_backend
from specexport.runtime.bundle import Bundle
from specexport.runtime.proposal import Opening, SlotView, open_proposer
from specexport.runtime.speculative import PLAIN, Speculative
from specexport.runtime.states import KeptStates, cell_rows
from specexport.verify.bundle import verify
from tests.checkpoints import GROUPED, HYBRIDS, VOCAB, make_checkpoint
from tests.manifests import put
from tests.streams import started, tokens_of

pytestmark = pytest.mark.exporter

ROUNDING = 5e-4
"""Of fp32, in transformers as here: recurrent layers of random weights amplify it."""
BUNDLES = ("lfm2-hybrid", "qwen3_5_text-hybrid", "granitemoehybrid-hybrid")
SIZES = ("heads", "key_heads", "key_size", "value_size", "rows")
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


# --- states -----------------------------------------------------------------------------------------------------------


def test_cells_begin_where_states_end():
    rows = cell_rows(past=[11, 8, 0], seen=[8, 8, 0], tokens=6, rows=24)
    assert rows.shape == (2, 3, CELL)
    # Three kept updates, six new ones, nothing; the third slot needs one cell only.
    assert rows[:, 0].reshape(-1).tolist() == [8, 9, 10, 24, 25, 26, 27, 28, 29] + 7 * [-1]
    assert rows[:, 1].reshape(-1).tolist() == [*range(24, 30)] + 10 * [-1]
    assert cell_rows([30], [24], 1, 24)[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 24, -1]


def test_kept_rows_are_those_of_the_last_tokens_that_stayed():
    layers = with_rows(
        [
            StateLayer(conv_size=5, conv_rows=3),
            StateLayer(
                conv_size=5,
                conv_rows=3,
                recurrence=Recurrence(heads=2, key_heads=1, key_size=4, value_size=3, rows=CELL),
            ),
        ],
        widest=6,
    )
    kept, random, past = KeptStates(layers, 2), np.random.default_rng(0), 0
    text: list[np.ndarray[Any, Any]] = []
    for tokens, stays in ((20, range(20)), (6, (0,)), (5, (0, 1, 2)), (6, (0, 2, 4)), (1, (0,)), (4, range(4))):
        blocks, parts = kept.outputs(1, tokens)
        for part in parts.values():
            part[:] = random.standard_normal(part.shape)
        text += [np.concatenate([parts["new_conv.0"][0, t], parts["new_updates.1"][0, t]]) for t in stays]
        kept.advance(range(1, 2), [past], [len(stays) if tokens == 20 else 1])
        kept.commit(1, past, list(stays), blocks, 0)
        past += len(stays)
        for position in range(past - 3, past):
            np.testing.assert_array_equal(kept.arrays["past_conv.0"][1, position % 3], text[position][:5])
        seen = kept._seen[1]
        assert seen % CELL == 0 and past - seen <= layers[1].recurrence.rows
        for position in range(seen, past):
            row = kept.arrays["past_updates.1"][1, position % (CELL + 6)]
            np.testing.assert_array_equal(row, text[position][5:])
    assert not kept.arrays["past_updates.1"][0].any()  # the other slot's


def rules(name: str, tokens: int) -> tuple[Callable[[], Any], Updates]:
    """A rule of transformers over random tokens, and the same tokens as ours are told them."""
    draw = torch.Generator().manual_seed(7)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(2, tokens, *shape, generator=draw)

    value, beta = noise(4, 6), noise(4).sigmoid()
    query, key = noise(2, 5), noise(2, 5)
    if name == "mamba2":
        dt, A = noise(4).exp(), -torch.rand(4, generator=draw)
        ours = Updates(query, key, value * dt[..., None], A * dt, None)
        return lambda: modeling_mamba2.mamba2_chunk_scan(value, dt, A, key, query, chunk_size=16), ours
    if name == "kimi_delta":
        query, key = noise(4, 5), noise(4, 5)
    g = -(noise(4, 5) if name == "kimi_delta" else noise(4)).exp()
    key = key / key.norm(dim=-1, keepdim=True)
    ours = Updates(query * 5**-0.5, key, value, g, beta)
    rule = modeling_qwen3_5.torch_chunk_gated_delta_rule
    if name == "kimi_delta":
        rule = modeling_kimi_linear.chunk_kimi_delta_attention
    return lambda: rule(query, key, value, g, beta)[0], ours


@pytest.mark.parametrize("name", ["gated_delta", "kimi_delta", "mamba2"])
def test_a_text_in_pieces_reads_the_same_to_the_last_bit(name):
    """Pieces of which a part is taken back, two slots of unequal length; against transformers', close."""
    tokens = 45
    theirs, updates = rules(name, tokens)
    expected = theirs()
    heads = {"heads": 4, "key_heads": 2, "key_size": 5, "value_size": 6}
    if name == "kimi_delta":
        heads |= {"key_heads": 4, "decays": 5}
    layers = with_rows([StateLayer(conv_size=3, conv_rows=2, recurrence=Recurrence(**heads, rows=CELL))], 12)

    def run(pieces: list[tuple[int, int, int]]) -> torch.Tensor:
        """(T, known, stays) of each step, of the first slot; the second one's first token is never there."""
        kept, past, read = KeptStates(layers, 2), 0, []
        for count, known, stays in pieces:
            pasts = [past, max(0, past - 1)]
            at = [torch.arange(begin, begin + count).clamp(max=tokens - 1) for begin in pasts]
            part = Updates(*(x if x is None else torch.stack([x[b, at[b]] for b in (0, 1)]) for x in updates))
            state_inputs = {tensors.KNOWN_TOKENS: np.array([known, max(0, known - (past == 0))])}
            state_inputs |= kept.cells(range(2), pasts, count) | {n: kept.arrays[n] for n in signature.states(layers)}
            states = StepStates(
                {0: layers[0]}, [torch.from_numpy(a.copy()) for a in state_inputs.values()], torch.tensor(pasts)
            )
            states.convolve(0, torch.zeros(2, 3, count), 3)
            read.append(states.read(part)[:, :stays])
            blocks, parts = kept.outputs(2, count)
            for n, returned in zip(signature.new_states(layers), states.returned, strict=True):
                parts[n][:] = returned
            kept.advance(range(2), pasts, state_inputs[tensors.KNOWN_TOKENS].tolist())
            kept.commit(0, past, range(stays), blocks, 0)
            kept.commit(1, pasts[1], range(stays - (past == 0)), blocks, 1)
            past += stays
        return torch.cat(read, 1)[0]

    whole = run([(tokens, tokens, tokens)])
    torch.testing.assert_close(whole, expected[0], atol=2e-5, rtol=1e-4)
    one_by_one = run([(1, 1, 1)] * tokens)
    drafted = run([(20, 20, 20), (12, 1, 3), (12, 1, 12), (7, 1, 1), (2, 1, 2), (12, 1, 7)])
    assert torch.equal(one_by_one, whole)
    assert torch.equal(drafted, whole)


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", HYBRIDS)
def test_families_equal_transformers(family, tmp_path):
    loaded = load_checkpoint(str(make_checkpoint(tmp_path, family)))
    assert loaded.cache and loaded.states
    assert any(layer.recurrence for layer in loaded.states.values()) == ("lfm2" not in family)
    parity.require_parity(loaded)


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [("jamba", {**GROUPED, "attn_layer_offset": 0, "attn_layer_period": 2}, "a rule that specexport does not know")],
)
def test_other_rules_are_refused_by_name(family, config, message, tmp_path):
    make_checkpoint(tmp_path, family, **config)
    with pytest.raises(BuildError, match=f"model family '{family}'.*{message}"):
        load_checkpoint(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}),
        ("nemotron_h", {"layers_block_type": ["mamba", "attention", "mlp"]}),
    ],
)
def test_a_step_graph_becomes_an_engine(family, layers, tmp_path):
    """Its recurrence is of standard operators that TensorRT-RTX builds; the runtime does not run it on GPUs yet."""
    out, (kinds,) = tmp_path / "bundle", layers.values()
    source = make_checkpoint(tmp_path / "target", family, **layers, num_hidden_layers=len(kinds))
    build(BuildOptions(str(source), out, methods="ngram", max_seq_len=64, lowering="portable"))
    graph = out / "fixed.onnx"
    write_source(out / "target.onnx", graph, "fp32", 0, {"B": 1, "S": 128}, compiled=True)
    sizes = {"B": 1, "S": 128, "T": 5, "R": 5, "C": 2}
    report = compile_graph(graph, tmp_path / "step.engine", [sizes], load_library("tensorrt-rtx"), ((8, 9),))
    assert report.size == (tmp_path / "step.engine").stat().st_size > 0


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUNDLES)
def test_a_step_goes_back_to_any_token(name, engine):
    """A hypothesis that is wrong here and there, so that every number of draft tokens is taken back."""
    model, taken = engine(name), set()
    for length in (3, 8, 21, 70):
        prompt = [5 + (7 * at) % 200 for at in range(length)]
        plain = model.generate(prompt, GREEDY, PLAIN).token_ids
        for every in (2, 3, 5, 7, 41):
            text = tuple(t if at % every else (t + 1) % VOCAB for at, t in enumerate(plain, 1))
            done = model.generate(prompt, GREEDY, Speculative(hypothesis=text))
            assert done.token_ids == plain
            taken.add(done.stats.accepted / done.stats.drafted)
    assert len(taken) > 3 and max(taken) > 0.9


@pytest.mark.parametrize("name", BUNDLES)
def test_logits_do_not_depend_on_how_a_text_was_cut(name, bundle):
    """By the model's own log-probabilities, which a prompt's are by chunks and an output's by steps."""
    request = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=1)
    with Engine.load(bundle(name), threads=1) as model:
        by_steps = model.generate([5, 9, 17], request, PLAIN)
        text = [5, 9, 17, *by_steps.token_ids]
        scored = model.generate(text, request.replace(max_tokens=1, prompt_logprobs=1), PLAIN)
        later = model.generate(text[:20], request.replace(max_tokens=13), PLAIN)
    source = read_manifest(bundle(name)).target.source
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        expected = model(torch.tensor([text]), use_cache=False).logits[0].double().log_softmax(-1)
    for row, entry in enumerate(by_steps.logprobs, 2):
        assert scored.prompt_logprobs[row].logprob == entry.logprob
        assert entry.logprob == pytest.approx(float(expected[row, text[row + 1]]), abs=ROUNDING)
    assert [entry.logprob for entry in later.logprobs] == [entry.logprob for entry in by_steps.logprobs[17:]]


@pytest.mark.usefixtures("whole_trees")
@pytest.mark.parametrize("name", ["qwen3_5_text-hybrid-batch", "dice-hybrid-batch", "dice-hybrid-portable"])
def test_requests_together_are_as_alone(name, bundle):
    """Of unequal lengths, coming and going, so that slots are taken over and moved."""
    random = np.random.default_rng(2)
    with Engine.load(bundle(name), threads=1) as model:
        vocab = model.manifest.target.vocab_size
        longest = model.manifest.max_seq_len - 25
        texts = [random.integers(3, vocab, min(size, longest)).tolist() for size in (2, 11, 30, 5, 19, 8, 24, 3, 9, 13)]
        limits = [4, 24, 9, 17, 24, 2, 24, 11, 6, 20]
        params = [GREEDY.replace(max_tokens=limit) for limit in limits]
        alone = [model.generate(text, way, PLAIN).token_ids for text, way in zip(texts, params, strict=True)]
        streams = started(map(model.stream, texts, params))
        together = [tokens_of(stream) for stream in streams]
    assert together == alone


@pytest.mark.parametrize("name", ["lfm2-hybrid", "qwen3_5_text-hybrid"])
def test_continued_texts_reuse_the_cache_or_are_read_again(name, bundle):
    prompt = [5 + (3 * at) % 150 for at in range(27)]
    with Engine.load(bundle(name), threads=1) as model:
        first = model.generate(prompt, GREEDY, PLAIN)
        longer = [*prompt, *first.token_ids, 9, 11]
        again = model.generate(longer, GREEDY, PLAIN)
        assert again.stats.cached_tokens == len(prompt) + 39  # all that the cache held
        other = model.generate([*prompt, 9, 11], GREEDY, PLAIN)
        assert other.stats.cached_tokens == 0  # states do not go back so far
        assert model.generate(longer, GREEDY).token_ids == again.token_ids  # drafted over what plain steps left
        assert model.generate([*prompt, 9, 11], GREEDY).token_ids == other.token_ids
        with Engine.load(bundle(name), threads=1, prefix_cache=False) as fresh:
            assert fresh.generate(longer, GREEDY, PLAIN).token_ids == again.token_ids
            assert fresh.generate([*prompt, 9, 11], GREEDY, PLAIN).token_ids == other.token_ids


@pytest.mark.parametrize("name", ["lfm2-hybrid", "qwen3_5_text-hybrid", "lfm2-hybrid-portable"])
def test_a_draft_forgets_what_was_not_accepted(name, bundle):
    """Every number of its tokens taken back, another token behind them; q is transformers' of the text that stayed."""
    opened = Bundle.open(bundle(name))
    method = opened.manifest.methods[0]
    draft = AutoModelForCausalLM.from_pretrained(method.model, dtype=torch.float32).eval()
    backend = open_backend(opened, BackendOptions("onnxruntime"))
    proposer = open_proposer(method, Opening(opened, backend, 1))
    random, text, tree = np.random.default_rng(4), [7, 9, 11], TokenTree.chain(6)
    for turn in range(36):
        if turn == 20:
            text = text[:9]  # another request, whose text begins alike
        view = SlotView(0, list(text), SamplingParams(temperature=0.8), random, tree)
        while proposer.prefill(view):
            pass
        proposals = proposer.propose([view])[0]
        drafted = proposals.tokens.tolist()
        with torch.no_grad():
            logits = draft(torch.tensor([[*text, *drafted[:-1]]]), use_cache=False).logits[0, len(text) - 1 :]
        p = torch.softmax(logits / 0.8, -1)
        expected = torch.gather(p, 1, torch.from_numpy(proposals.q.ids))
        expected /= expected.sum(-1, keepdim=True)
        np.testing.assert_allclose(proposals.q.probs, expected.numpy(), atol=ROUNDING)
        text += [*drafted[: turn % 6], int(random.integers(3, VOCAB))]
    backend.close()


# --- what is refused, and what is said --------------------------------------------------------------------------------


def test_chain_only_methods_refuse_trees(tmp_path):
    target = str(make_checkpoint(tmp_path / "target", "lfm2"))
    dense = str(make_checkpoint(tmp_path / "dense", "llama"))
    tree = TokenTree.from_choices([[0], [1]])

    def refused(message: str, source: str = target, **options: Any) -> None:
        with pytest.raises(BuildError, match=message):
            build(BuildOptions(source, tmp_path / "out", max_seq_len=64, **options))
        assert not (tmp_path / "out").exists()

    with pytest.raises(BuildError, match="has conv layers; layers without attention run only on CPUs so far"):
        plan(target, None, DEVICES["orin-nano-8gb"], precision="int8", context=64, acceptance=0.5)
    refused("which read only chains, and 'draft_model'", methods={"model": dense, "trees": [tree]})
    refused("which read only chains, and 'lookahead'", methods="lookahead:3,3,2")
    refused("self_draft: .* has layers without attention", methods="self_draft:1")
    refused("which run only on CPUs so far", methods="ngram", backend="onnxruntime-cuda")
    refused("which run only on CPUs so far", dense, methods=f"draft_model:{target}", backend="onnxruntime-cuda")
    method = f"draft_model:{dense},num_speculative_tokens=3"
    build(BuildOptions(target, tmp_path / "out", method, max_seq_len=64, precision="int8"))
    report = verify(tmp_path / "out", max_tokens=12)
    assert report.passed, report
    build(BuildOptions(dense, tmp_path / "drafted", {"model": target, "trees": [tree]}, max_seq_len=64))
    report = verify(tmp_path / "drafted", max_tokens=12)
    assert report.passed, report
    with pytest.raises(BackendError, match="onnxruntime-cuda does not run layers without attention yet"):
        Engine.load(tmp_path / "drafted", backend="onnxruntime-cuda")
    with pytest.raises(BuildError, match="only on CPUs so far"):
        compile_bundle(tmp_path / "out", CompileOptions("tensorrt-rtx"))
    with pytest.raises(BackendError, match="onnxruntime-cuda does not run layers without attention yet"):
        Engine.load(tmp_path / "out", backend="onnxruntime-cuda")


def test_manifests_describe_graph_inputs(bundle, tmp_path):
    for number, (place, value, text) in enumerate(
        (
            ("target.states.0.conv_size", 7, r"states\[0\]"),
            ("target.states.1.recurrence.rows", 99, r"states\[1\]"),
            ("target.states", [], "known_tokens"),
            ("target.states.0.recurrence.rows", 2**24, "by states"),
            ("target.states.0.conv_rows", 2**24, "by states"),
            ("target.states.0.recurrence", dict.fromkeys(SIZES, 2**24), "cache would take"),
        )
    ):
        folder = shutil.copytree(bundle("qwen3_5_text-hybrid"), tmp_path / str(number))
        put(folder, place, value)
        with pytest.raises(BundleError, match=text):
            Engine.load(folder)
