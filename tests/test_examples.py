"""The examples: the notebook, and three stages of speech recognition over a real encoder's draft."""

import re
import wave
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Wav2Vec2ForCTC

from examples.speech import transcribe as speech
from specexport.runtime import EmbedsPrompt, Engine, SamplingParams
from specexport.runtime.speculative import PLAIN

pytestmark = pytest.mark.exporter


GREEDY = SamplingParams(temperature=0.0, max_tokens=128)


def relaxed(likelihood: float, entropy: float | None = None) -> SamplingParams:
    return GREEDY.replace(acceptance="relaxed", likelihood_threshold=likelihood, entropy_threshold=entropy)


def test_stages_of_speech_recognition_and_their_counters(tmp_path, capsys):
    speech.main(["prepare", str(tmp_path)])
    sound, encoder = speech.chirp(1.7), speech.Encoder(tmp_path)
    heard = encoder.hear(sound)

    # What was exported is the checkpoint, at another length than it was traced with.
    ctc = Wav2Vec2ForCTC.from_pretrained(tmp_path / "ctc").eval()
    normal = (sound - sound.mean()) / np.sqrt(sound.var() + 1e-7)
    with torch.no_grad():
        p = ctc(torch.tensor(normal)[None]).logits[0].double().softmax(-1)
    np.testing.assert_allclose(heard.entropies, -(p * p.log()).sum(-1), atol=1e-4)
    assert len(set(heard.text)) > 3

    with Engine.load(tmp_path / "bundle", threads=1) as engine:

        def run(params: SamplingParams) -> Any:
            return speech.transcribe(encoder, engine, sound, params)

        draft = [*engine.tokenizer.encode(heard.text, add_special_tokens=False).ids]
        draft += engine.manifest.tokenizer.eos_token_ids[:1]
        worst = float(heard.entropies.max())

        taken = run(relaxed(0.2, worst + 0.01))
        assert (taken.text, taken.unchanged, taken.passes, taken.steps, taken.decoded) == (heard.text, True, 0, 0, 0)
        assert not run(relaxed(0.2, worst)).unchanged

        kept = run(relaxed(0.0))
        assert list(kept.token_ids[:32]) == draft[:32]
        assert (kept.draft, kept.unchanged) == (len(draft), False)

        prompt = EmbedsPrompt([speech.BEFORE, heard.embeds, speech.AFTER])
        plain = engine.generate(prompt, GREEDY, PLAIN).token_ids
        for params in (GREEDY, relaxed(1.0)):
            completion = run(params)
            assert completion.token_ids == plain
            assert completion.kept + completion.decoded == len(plain)

        # The decoder in transformers, given the same embeddings, keeps as many of the draft's tokens.
        decoder = AutoModelForCausalLM.from_pretrained(speech.DECODER, dtype=torch.float32).eval()
        layer = decoder.get_input_embeddings()
        read = engine.encode(prompt)
        start = torch.tensor(read.rows)
        before, after = (
            layer(torch.tensor(engine.tokenizer.encode(text).ids)) for text in (speech.BEFORE, speech.AFTER)
        )
        with torch.no_grad():
            text = torch.cat([before, start, after, layer(torch.tensor(draft))])
            rows = decoder(inputs_embeds=text[None]).logits[0, len(text) - len(draft) - 1 : -1].softmax(-1)
        likelihoods = rows[torch.arange(len(draft)), torch.tensor(draft)].tolist()
        kept_counts = set()
        lowest = [at for at, value in enumerate(likelihoods) if value < min(likelihoods[:at], default=1.0)]
        for stays in [at for at in lowest if at < speech.DRAFT_TOKENS[0]][-3:]:
            threshold = likelihoods[stays] * 1.001
            completion = run(relaxed(threshold))
            # The token after those kept is the decoder's own, which may be the draft's too.
            assert completion.kept >= stays
            assert list(completion.token_ids[:stays]) == draft[:stays]
            assert completion.token_ids[stays] == int(rows[stays].argmax())
            assert completion.passes == 1
            kept_counts.add(stays)
        assert len(kept_counts) > 1

    file = tmp_path / "sound.wav"
    with wave.open(str(file), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(speech.RATE)
        out.writeframes((sound * 2**15).astype("<i2").tobytes())
    np.testing.assert_allclose(speech.read_wave(file), sound, atol=2**-14)
    capsys.readouterr()
    speech.main(["run", str(tmp_path), str(file), "--threads", "1", "-n", "16"])
    printed = capsys.readouterr().out
    assert "stage 1  too uncertain" in printed
    assert "stage 3" in printed


# --- the notebook -----------------------------------------------------------------------------------------------------


EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.slow
def test_the_notebook_draws_its_measurements():
    """It runs from its first cell to its last, and its charts show what it measured."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(EXAMPLES / "speedup.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)  # they would change with each run
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": EXAMPLES}}).execute()
    printed = "".join(output.text for cell in cells for output in cell.outputs if output.get("name") == "stdout")
    measured = re.findall(r"K = (\d): ([\d.]+)x, ([\d.]+) tokens a step", printed)
    assert [int(k) for k, *_ in measured] == [1, 2, 3, 4, 6, 8]
    for which, cell in enumerate(cells[-2:], start=1):
        (shown,) = cell.outputs
        drawn = ElementTree.fromstring(shown["data"]["image/svg+xml"])
        titles = [output.text or "" for output in drawn.iter("{http://www.w3.org/2000/svg}title")]
        points = re.findall(r": ([\d.]+) at (\d)", "\n".join(titles))
        assert [(k, round(float(y), 2)) for y, k in points] == [
            (output[0], pytest.approx(float(output[which]), abs=0.011)) for output in measured
        ]
    length = [float(output[2]) for output in measured]
    assert 1 < length[0] < 2 < length[3] < 5  # K = 1 and 4
