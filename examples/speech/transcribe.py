"""Speech to text by a decoder that verifies the transcript of its encoder's CTC head (arXiv 2603.11243).

    python examples/speech/transcribe.py prepare build/speech
    python examples/speech/transcribe.py run build/speech sound.wav

An encoder turns sound into frames. Its CTC head predicts a transcript from them, and a projector turns them into
embeddings in the prompt of the decoder, an LLM. The transcript is the draft, in three stages:

1. If the entropy of all frames is below a threshold, the draft is the output, without the decoder.
2. Otherwise the decoder verifies the draft, many tokens per pass: tokens stay while their likelihood is above a second
   threshold. With --lossless they stay only if the decoder would have generated them.
3. From the first rejected token, the decoder generates the rest, with the rest of the draft as a hint.

``prepare`` needs the [export] extra, ``run`` only [cpu]. Without your own checkpoints, the encoder is tiny and random:
the transcript is meaningless, but all stages run.
"""

from __future__ import annotations

import argparse
import json
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from specexport.runtime import EmbedsPrompt, Engine, SamplingParams

Floats = npt.NDArray[np.float32]

RATE = 16_000
BEFORE, AFTER = "Sound: ", "\nTranscript: "
"""The decoder's prompt before and after the sound."""
DRAFT_TOKENS = (32, 16, 8, 4, 2)
"""Numbers of draft tokens per pass, the largest that a bundle may have first."""
DECODER = Path(__file__).parents[1] / "models" / "demo-target"
"""The default decoder, which knows only Python's sources."""


# --- hearing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heard:
    """The encoder's output for a sound of F frames.

    Attributes:
        text: the transcript of the CTC head.
        entropies: entropy of each frame in nats.
        embeds: embeddings for the decoder, float32 ``[F,H]``.
    """

    text: str
    entropies: Floats
    embeds: Floats


class Encoder:
    """The exported encoder, its CTC vocabulary and projector."""

    def __init__(self, folder: Path) -> None:
        self._session = onnxruntime.InferenceSession(str(folder / "encoder.onnx"), providers=["CPUExecutionProvider"])
        ctc = json.loads((folder / "ctc.json").read_text(encoding="utf-8"))
        self._letters, self._blank = ctc["letters"], ctc["blank"]

    def hear(self, sound: Floats) -> Heard:
        """Runs the encoder over samples in [-1, 1] at 16 kHz."""
        normal = (sound - sound.mean()) / np.sqrt(sound.var() + 1e-7)
        logits, embeds = self._session.run(["logits", "embeds"], {"sound": normal[None].astype(np.float32)})
        scaled = logits[0].astype(np.float64)
        scaled -= scaled.max(-1, keepdims=True)
        log_p = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
        return Heard(self._collapsed(log_p.argmax(-1)), -(np.exp(log_p) * log_p).sum(-1), embeds[0])

    def _collapsed(self, best: npt.NDArray[np.int64]) -> str:
        """The text of greedy CTC: repeated letters count once, blanks not at all."""
        first = np.append(True, best[1:] != best[:-1])
        return "".join(self._letters[index] for index in best[first] if index != self._blank).replace("|", " ").strip()


# --- transcribing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transcript:
    """A transcript and the figures of each stage.

    Attributes:
        draft: number of tokens of the draft, its end included.
        unchanged: whether stage 1 accepted the draft.
        passes: number of passes of the decoder in stage 2.
        kept: number of tokens of the draft that stayed.
        steps: number of steps of the decoder in stage 3.
        decoded: number of tokens generated in stage 3.
    """

    text: str
    token_ids: tuple[int, ...]
    frames: int
    entropy: float
    draft: int
    unchanged: bool
    passes: int
    kept: int
    steps: int
    decoded: int


def transcribe(encoder: Encoder, engine: Engine, sound: Floats, params: SamplingParams) -> Transcript:
    """Runs the three stages, with the thresholds of ``params``."""
    heard = encoder.hear(sound)
    # The draft ends with an end token, or the decoder would be asked to continue it.
    draft = engine.tokenizer.encode(heard.text, add_special_tokens=False).ids
    draft += engine.manifest.tokenizer.eos_token_ids[:1]
    entropy = float(heard.entropies.max())
    prompt = EmbedsPrompt([BEFORE, heard.embeds, AFTER])
    tokens: list[int] = []
    text = ""
    passes = steps = 0
    with engine.stream(prompt, params, {"hypothesis": draft, "hypothesis_entropy": entropy}) as stream:
        for chunk in stream:
            following = agreed(tokens, draft) == len(tokens)
            passes, steps = passes + following, steps + (not following)
            tokens += chunk.token_ids
            text += chunk.text
        unchanged = stream.stats.steps == 0
    kept = agreed(tokens, draft)
    return Transcript(
        text=text,
        token_ids=tuple(tokens),
        frames=len(heard.entropies),
        entropy=entropy,
        draft=len(draft),
        unchanged=unchanged,
        passes=0 if unchanged else passes,
        kept=kept,
        steps=steps,
        decoded=len(tokens) - kept,
    )


def agreed(tokens: list[int], draft: list[int]) -> int:
    """The number of first tokens that are the same."""
    pairs = enumerate(zip(tokens, draft, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(tokens), len(draft)))


def report(transcript: Transcript) -> str:
    """A transcript and its figures in words."""
    accepted = "accepted" if transcript.unchanged else "too uncertain"
    lines = [
        transcript.text,
        "",
        f"draft    {transcript.draft} tokens from {transcript.frames} frames",
        f"stage 1  {accepted}: the highest entropy of a frame is {transcript.entropy:.3f} nats",
    ]
    if not transcript.unchanged:
        lines += [
            f"stage 2  {transcript.kept} of {transcript.draft} draft tokens kept in {transcript.passes} passes",
            f"stage 3  {transcript.decoded} tokens in {transcript.steps} steps",
        ]
    return "\n".join(lines)


def read_wave(path: Path) -> Floats:
    """The samples of a 16-bit mono WAV file at 16 kHz, in [-1, 1]."""
    with wave.open(str(path), "rb") as file:
        actual = (file.getframerate(), file.getnchannels(), 8 * file.getsampwidth())
        if actual != (RATE, 1, 16):
            raise SystemExit(
                f"{path}: {actual[0]} Hz, {actual[1]} channels, {actual[2]} bits; expected 16000 Hz, 1, 16"
            )
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 2**15


def chirp(seconds: float = 2.0) -> Floats:
    """A sound of rising pitch, as an example."""
    time = np.arange(int(seconds * RATE)) / RATE
    return np.asarray(0.5 * np.sin(2 * np.pi * (200 + 300 * time) * time), np.float32)


# --- preparing --------------------------------------------------------------------------------------------------------


def prepare(folder: Path, ctc: Path | None = None, decoder: Path = DECODER, projector: Path | None = None) -> None:
    """Exports the encoder and builds the decoder's bundle.

    Args:
        folder: the folder to write ``encoder.onnx``, ``ctc.json`` and ``bundle/`` to.
        ctc: a Wav2Vec2ForCTC checkpoint with its vocab.json; None for a tiny random model.
        decoder: the checkpoint of a causal LM.
        projector: safetensors with ``weight [H,E]`` and ``bias [H]``, from the encoder's E numbers per frame to the
            decoder's H; None for a random projector.
    """
    import torch
    from transformers import AutoModelForCausalLM, Wav2Vec2ForCTC

    from specexport.exporter.build import build
    from specexport.exporter.checkpoints.quiet import quiet
    from specexport.exporter.options import BuildOptions

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    ctc = ctc or _tiny_encoder(folder / "ctc")
    heard = Wav2Vec2ForCTC.from_pretrained(ctc, attn_implementation="eager").eval()
    width = AutoModelForCausalLM.from_pretrained(decoder).get_input_embeddings().weight.shape[1]
    project = torch.nn.Linear(heard.config.output_hidden_size, width)
    if projector is not None:
        from safetensors.torch import load_file

        project.load_state_dict(load_file(projector))

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heard, self.project = heard, project

        def forward(self, sound: Any) -> Any:
            frames = self.heard.wav2vec2(sound).last_hidden_state
            return self.heard.lm_head(frames), self.project(frames)

    samples = torch.export.Dim("samples", min=RATE // 10)
    with quiet():
        torch.onnx.export(
            Both().eval(),
            (torch.zeros(1, RATE),),
            str(folder / "encoder.onnx"),
            dynamo=True,
            dynamic_shapes=({1: samples},),
            input_names=["sound"],
            output_names=["logits", "embeds"],
            verbose=False,
        )
    letters = json.loads((ctc / "vocab.json").read_text(encoding="utf-8"))
    spelled = {"letters": sorted(letters, key=letters.__getitem__), "blank": heard.config.pad_token_id}
    (folder / "ctc.json").write_text(json.dumps(spelled), encoding="utf-8")
    build(
        BuildOptions(
            target=str(decoder),
            output=folder / "bundle",
            methods=({"method": "hypothesis", "num_speculative_tokens": DRAFT_TOKENS},),
            inputs_embeds=True,
            max_batch_size=1,
            overwrite=True,
        )
    )


def _tiny_encoder(folder: Path) -> Path:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    letters = ["<pad>", "|", *"abcdefghijklmnopqrstuvwxyz'"]
    config = Wav2Vec2Config(
        vocab_size=len(letters),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=(16, 16, 16),
        conv_kernel=(20, 16, 8),
        conv_stride=(10, 8, 4),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        pad_token_id=0,
    )
    model = Wav2Vec2ForCTC(config)
    model.lm_head.weight.data *= 40  # so that it predicts different letters, like a trained model
    model.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({letter: index for index, letter in enumerate(letters)}))
    return folder


# --- the commands -----------------------------------------------------------------------------------------------------


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("prepare", help="export the encoder and build the decoder's bundle")
    making.add_argument("folder", type=Path, help="folder to write")
    making.add_argument("--ctc", type=Path, metavar="DIR", help="Wav2Vec2ForCTC checkpoint (default: tiny and random)")
    making.add_argument(
        "--decoder",
        type=Path,
        default=DECODER,
        metavar="DIR",
        help="causal LM's checkpoint (default: the demo's target)",
    )
    making.add_argument("--projector", type=Path, metavar="FILE", help="safetensors: weight, bias (default: random)")
    running = commands.add_parser("run", help="transcribe a sound")
    running.add_argument("folder", type=Path, help="folder that prepare has written")
    running.add_argument("sound", type=Path, nargs="?", metavar="WAV", help="16 kHz, mono, 16 bits (default: a chirp)")
    running.add_argument(
        "--entropy-threshold", type=float, default=0.7, help="threshold of stage 1 in nats (default: 0.7)"
    )
    running.add_argument("--likelihood-threshold", type=float, default=0.2, help="threshold of stage 2 (default: 0.2)")
    running.add_argument("--lossless", action="store_true", help="give the text of the decoder alone")
    running.add_argument("-n", "--max-tokens", type=int, default=128, help="maximum number of tokens (default: 128)")
    running.add_argument("--threads", type=int, metavar="N", help="CPU threads of the decoder (default: all cores)")
    arguments = parser.parse_args(words)
    if arguments.command == "prepare":
        prepare(arguments.folder, arguments.ctc, arguments.decoder, arguments.projector)
        return
    params = SamplingParams(
        temperature=0.0,
        max_tokens=arguments.max_tokens,
        acceptance="lossless" if arguments.lossless else "relaxed",
        likelihood_threshold=arguments.likelihood_threshold,
        entropy_threshold=None if arguments.lossless else arguments.entropy_threshold,
    )
    sound = read_wave(arguments.sound) if arguments.sound is not None else chirp()
    with Engine.load(arguments.folder / "bundle", threads=arguments.threads) as engine:
        print(report(transcribe(Encoder(arguments.folder), engine, sound, params)))


if __name__ == "__main__":
    main()
