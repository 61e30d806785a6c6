"""DFlash drafts are trained: by the formulas, they learn, go on where they stopped, and bundles are built of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specexport.cli import main
from specexport.contract.errors import SpecExportError
from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions
from specexport.graphs.layers import recorded_states
from specexport.methods.dflash.export import read_dflash, save_dflash
from specexport.methods.dflash.train import draft_accuracy, draft_loss, new_draft, random_anchors, train_dflash
from specexport.methods.dflash.train_options import DFlashOptions
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.speculative import PLAIN
from specexport.training.data import Windows
from specexport.training.loop import Schedule, muon_and_adamw, train
from specexport.training.run import load_model
from tests.checkpoints import VOCAB, make_checkpoint
from tests.test_dflash import Paper
from tests.training import CPU, SAVE_EVERY, silent, train_whole_and_parted, write_words

pytestmark = [pytest.mark.exporter, pytest.mark.slow]

STATES, BLOCK = (1, 2), 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp("text"))


@pytest.fixture
def options(target: Path, text: Path, tmp_path: Path) -> Callable[..., DFlashOptions]:
    def make(name: str = "out", **changed: Any) -> DFlashOptions:
        fields = {
            "target": str(target), "data": [text], "output": tmp_path / name, "states": STATES, "layers": 2,
            "seq_len": 32, "batch_size": 4, "steps": 6, "draft_block": BLOCK, "anchors": 6, "save_every": SAVE_EVERY,
            "precision": "fp32",
        }  # fmt: skip
        return DFlashOptions(**(fields | changed))  # type: ignore[arg-type]

    return make


def _windows(ids: torch.Tensor) -> Windows:
    return Windows(ids.int(), torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids).int())


def test_the_loss_is_that_of_blocks_by_the_formulas(
    target: Path, options: Callable[..., DFlashOptions], tmp_path: Path
) -> None:
    """Block after block against all of them at once, some of which reach past the text: logits, and their loss."""
    decay, length = 0.7, 9
    ids = torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))
    windows = _windows(ids)
    torch.manual_seed(0)
    loaded = load_model(str(target), CPU, frozen=True)
    draft = new_draft(options(intermediate_size=48), loaded, STATES)
    save_dflash(tmp_path / "draft", draft, STATES, 2, dtype=torch.float32)
    anchors = torch.tensor([[0, 3, 6], [1, 5, 7]])
    texts: list[torch.Tensor] = []
    hook = draft.lm_head.register_forward_hook(lambda _module, _args, output: texts.append(output))
    loss, _ = draft_loss(draft, loaded.model, STATES, windows.rows(torch.arange(2)), anchors, decay)
    hook.remove()

    plain = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager").eval()
    with torch.no_grad(), recorded_states(plain, STATES) as noted:
        logits = plain(ids, use_cache=False).logits
    states = torch.cat([noted[count] for count in STATES], -1)
    paper = Paper(tmp_path / "draft", target, theta=10000.0)
    losses: list[list[torch.Tensor]] = [[] for _ in range(BLOCK - 1)]
    actual = [iter(text) for text in texts]
    for row in range(2):
        for anchor in anchors[row].tolist():
            expected_own = paper.logits(states[row, : anchor + 1], int(ids[row, anchor + 1]), BLOCK - 1)
            for ahead in range(min(BLOCK - 1, length - 2 - anchor)):
                torch.testing.assert_close(next(actual[ahead]), expected_own[ahead], rtol=1e-4, atol=1e-4)
                wanted = logits[row, anchor + 1 + ahead].softmax(-1)
                losses[ahead].append(-(wanted * expected_own[ahead].log_softmax(-1)).sum())
    expected = torch.stack([decay**at * torch.stack(part).mean() for at, part in enumerate(losses)]).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)


def test_a_draft_learns_blocks(target: Path, options: Callable[..., DFlashOptions], tmp_path: Path) -> None:
    """A language that follows from one token, which the target does not speak: its distribution is put in place."""
    loaded = load_model(str(target), CPU, frozen=True)
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    ids = (torch.arange(64)[:, None] * 7 + torch.arange(24)) % 50 + 100
    windows = _windows(ids)
    torch.manual_seed(0)
    draft = new_draft(options(), loaded, STATES)
    # The target's own head, but of tokens that follow each other.
    hook = loaded.model.get_output_embeddings().register_forward_hook(
        lambda _module, _args, output: 20 * torch.nn.functional.one_hot(following, VOCAB)[None].float()
    )
    parameters = {name: item for name, item in draft.named_parameters() if item.requires_grad}

    def loss_at(number: int) -> Any:
        nonlocal following
        batch = windows.rows(windows.order(number, 16, 0))
        following = batch.ids.roll(-1, dims=1)[batch.learnt_from(1)]
        return draft_loss(draft, loaded.model, STATES, batch, random_anchors(batch, 8, 0, number), 0.8)

    following = ids[:0, 0]
    trained = train(
        "test",
        parameters,
        muon_and_adamw(parameters.values(), (), 1e-2),
        Schedule(100, 10),
        loss_at,
        checkpoint=tmp_path / "draft.pt",
        log=silent,
    )
    batch = windows.rows(torch.arange(8))
    following = batch.ids.roll(-1, dims=1)[batch.learnt_from(1)]
    accuracy = draft_accuracy(draft, loaded.model, STATES, _windows(ids[:8]), CPU)
    hook.remove()
    assert all(row[0] > 0.9 for row in accuracy.ranks), accuracy.ranks
    assert accuracy.paths[0, 0, 0] > 0.8
    assert len(trained.history[-1]["top-1"]) == BLOCK - 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.model.state_dict().items())
    assert torch.equal(draft.embed_tokens.weight, before["model.embed_tokens.weight"])


def test_anchors_are_drawn_where_something_is_learnt() -> None:
    windows = _windows(torch.arange(40).view(2, 20))
    windows.learn[:, :10] = False
    batch = windows.rows(torch.arange(2))
    first, second = (random_anchors(batch, 5, 3, number) for number in (0, 1))
    assert first.tolist() != second.tolist()
    assert torch.equal(first, random_anchors(batch, 5, 3, 0))
    # Behind the anchor comes the root, and behind that a token that is learnt.
    assert all(8 <= at < 18 for at in (*first.flatten().tolist(), *second.flatten().tolist()))
    assert all(len(set(row)) == 5 for row in first.tolist())


@pytest.mark.parametrize(
    ("settings", "stopped_at"),
    [
        ({"self_distill": 16, "accumulate": 2, "mask_token_id": 5}, "draft: step 4"),
        ({"optimizer": "muon", "states": None, "layers": 1}, "draft: step 6"),
    ],
    ids=["texts", "data"],
)
def test_resumed_runs_equal_uninterrupted_ones(
    options: Callable[..., DFlashOptions], settings: dict[str, Any], stopped_at: str
) -> None:
    record, whole, _ = train_whole_and_parted(train_dflash, options, settings, stopped_at)
    outline = read_dflash(str(whole))
    assert outline.states == ((2,) if "layers" in settings else STATES)
    assert (outline.block_size, outline.causal) == (BLOCK, (False,) * settings.get("layers", 2))
    assert outline.mask_token == settings.get("mask_token_id", outline.mask_token)
    state = load_file(whole / "model.safetensors")
    assert "layers.0.self_attn.q_norm.weight" in state
    assert not {"lm_head.weight", "embed_tokens.weight"} & state.keys()
    assert len(record["accuracy"]) == BLOCK - 1
    assert json.loads((whole / "training.json").read_text()) == record


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"draft_block": 1}, "draft_block is 1; expected a whole number from 2 to 33"),
        ({"draft_block": 16, "seq_len": 16}, r"--draft-block is 16; expected 2 to 15, one less than --seq-len"),
        ({"mask_token_id": 400}, r"--mask-token-id is 400; expected 0 to 319, the target's last token"),
        ({"states": (0, 2)}, r"--states is 0; expected 1 to 2, the target's layers"),
        ({"states": (1, 1)}, "--states: 1 1; expected different"),
        ({"states": (1, 3)}, "--states: 1 3; expected different numbers of layers, from 0 to the target's 2"),
        ({"anchors": 0}, "anchors is 0; expected a whole number >= 1"),
    ],
)
def test_options_out_of_range_are_refused_by_name(
    options: Callable[..., DFlashOptions], changed: dict[str, Any], expected: str
) -> None:
    with pytest.raises(SpecExportError, match=expected):
        train_dflash(options(**changed), silent)


def test_trained_folders_are_built(
    target: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "draft"
    words = ["train", "dflash", "--target", str(target), "--data", str(text), "--seq-len", "32", "-o", str(out)]
    assert main([*words, "--layers", "1", "--draft-block", "4", "--anchors", "4", "--steps", "3"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "3 drafted tokens; share of held-out tokens" in shown
    assert "a chain of 3 would commit" in shown
    bundle = build(
        BuildOptions(
            target=str(target),
            output=tmp_path / "bundle",
            methods=({"method": "dflash", "model": str(out)},),
            max_seq_len=64,
            max_batch_size=1,
        )
    )
    with Engine.load(bundle, threads=1) as engine:
        greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        done = engine.generate([5, 6, 7], greedy)
        assert done.stats.drafted > 0
        assert done.token_ids == engine.generate([5, 6, 7], greedy, PLAIN).token_ids
