"""Look into a pretrained LSTM that tells voices apart: nested outputs, gradients through time, a recording on disk.

The network and its weights are those of Resemblyzer; the voices are made here, so no audio file is needed. An LSTM
returns ``(output, (hidden, cell))``, which PyTorch's own hooks pass on as it is; Hookline gives each of the three
tensors a name, ``output[0]``, ``output[1][0]`` and ``output[1][1]``, and each its own gradient.

    python examples/speaker_lstm.py --out voices.hookline
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path

import torch
from torch import nn

import hookline

RATE = 16_000
"""Samples in a second."""

VOWELS = {"a": (730, 1090, 2440), "i": (270, 2290, 3010), "u": (300, 870, 2240)}
"""Resonances of a man's vocal tract in Hz (Peterson and Barney, 1952)."""


class VoiceEncoder(nn.Module):
    """Spectrograms (voices, frames, 40) in, one vector of length 1 for each voice out, shape (voices, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(input_size=40, hidden_size=256, num_layers=3, batch_first=True)
        self.linear = nn.Linear(256, 256)
        self.relu = nn.ReLU()

    def forward(self, mels: torch.Tensor) -> torch.Tensor:
        _, (hidden, _) = self.lstm(mels)
        vectors = self.relu(self.linear(hidden[-1]))
        return vectors / vectors.norm(dim=1, keepdim=True)


def pretrained() -> VoiceEncoder:
    package = importlib.util.find_spec("resemblyzer")
    if package is None or package.origin is None:
        raise SystemExit(
            "No module named 'resemblyzer', which holds the weights. Install it:\n"
            "    pip install --no-deps -r requirements-models.txt"
        )
    weights = torch.load(Path(package.origin).parent / "pretrained.pt", map_location="cpu", weights_only=True)
    model = VoiceEncoder()
    model.load_state_dict(weights["model_state"], strict=False)  # it also holds two numbers of the training's loss
    return model.eval()


def voice(pitch: float, tract: float, vowels: str) -> torch.Tensor:
    """1.6 seconds of sound: harmonics of the pitch in Hz, louder near the resonances of each vowel times ``tract``."""
    time = torch.arange(int(1.6 * RATE)) / RATE
    phase = 2 * torch.pi * torch.cumsum(pitch * (1 + 0.03 * torch.sin(2 * torch.pi * 4 * time)), dim=0) / RATE
    sound = torch.zeros_like(time)
    for part, vowel in zip(sound.chunk(len(vowels)), vowels, strict=True):
        resonances = torch.tensor(VOWELS[vowel]) * tract
        start = part.storage_offset()
        for harmonic in range(1, int(4000 / pitch)):
            loudness = (1 / (1 + ((harmonic * pitch - resonances) / 90) ** 2)).sum() / harmonic**0.5
            part += loudness * torch.sin(harmonic * phase[start : start + len(part)])
    return 0.05 * sound / sound.square().mean().sqrt()


def mel_spectrogram(sound: torch.Tensor) -> torch.Tensor:
    """Energy in 40 bands, one row every 10 ms; shape (frames, 40). The bands are those of the training."""
    rate = math.log(6.4) / 27  # Slaney's mel scale: even steps up to 1000 Hz, then even ratios
    mels = torch.linspace(0, 15 + math.log(8) / rate, 42)
    edges = torch.where(mels < 15, mels * 200 / 3, 1000 * torch.exp((mels - 15) * rate))
    bins = torch.linspace(0, RATE / 2, 201)
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    bands = torch.minimum(rising, falling).clamp(min=0) * (2 / (edges[2:] - edges[:-2]))[:, None]
    spectrum = torch.stft(sound, 400, 160, window=torch.hann_window(400), pad_mode="constant", return_complex=True)
    return (bands @ spectrum.abs().square()).T[:160]


def main() -> None:
    parser = argparse.ArgumentParser(description="Record an LSTM that tells voices apart, forward and backward.")
    parser.add_argument("--out", type=Path, default=Path("voices.hookline"), help="where to save it (%(default)s)")
    options = parser.parse_args()

    model = pretrained()
    sounds = [voice(110, 1.0, "aiu"), voice(114, 1.0, "uai"), voice(225, 1.18, "aiu")]
    mels = torch.stack([mel_spectrogram(sound) for sound in sounds]).requires_grad_()
    with hookline.record(model, ports=("output", "grad_output", "grad_input")) as rec:
        vectors = model(mels)
        (vectors[0] @ vectors[1]).backward()

    same, other = (vectors[0] @ vectors[1]).item(), (vectors[0] @ vectors[2]).item()
    print(f"similarity: {same:.2f} for one voice twice, {other:.2f} for two voices\n\n{rec}\n")

    grad_frames, (grad_hidden, grad_cell) = rec["lstm"].grad_output
    print(f"hidden state:    rec['lstm'].output[1][0] of shape {tuple(rec['lstm'].output[1][0].shape)}")
    print(f"its gradient:    norm {grad_hidden.norm():.2e}; all frames: {grad_frames}, cell state: {grad_cell}")
    by_frame = rec["lstm"].grad_input[0].norm(dim=1)  # of the first voice
    quarters = ", ".join(f"{part.mean():.1e}" for part in by_frame.chunk(4))
    print(f"gradient at the frames of the first voice, mean norm by quarter: {quarters}")

    rec.save(options.out, overwrite=True)
    again = hookline.load(options.out)
    equal = torch.equal(again["lstm"].output[1][0], rec["lstm"].output[1][0])
    print(f"\nsaved to {options.out} and read back: {len(again)} values, {'equal' if equal else 'NOT equal'}")


if __name__ == "__main__":
    main()
