"""A network like Jasper (Li et al. 2019), 1-D convolutions and CTC, that recognises spoken numbers.

Debian's ``espeak-ng`` speaks the numbers below 10,000 in words, in several voices, at several rates and pitches:
apt-get install espeak-ng. What it has spoken is kept in build/studies.
"""

from __future__ import annotations

import io
import string
import subprocess
import wave
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jobs.data import Task
from studies import own_data, report
from studies.problem import Problem, need

FILE = report.ROOT / "build" / "studies" / "networks" / "speech.npz"
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-029")
VARIANTS = ("", "+m1", "+m3", "+m7", "+f1", "+f2", "+f4")
TRAIN, TEST = 2400, 300
SOUND = 22050
"""Samples a second, of espeak-ng."""
NOISE = (0.0, 15.0)
"""Decibels by which it is weaker than speech, from the least to the most."""
BANDS, WINDOW, HOP = 32, 512, 256
LETTERS = " " + string.ascii_lowercase
"""Labels from 1; 0 is CTC's blank, and fills rows."""
ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine",
    "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
WIDTH = 64


def in_words(number: int) -> str:
    """``number``, below 10,000, as it is spoken."""
    if number < 20:
        return ONES[number]
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = f" {in_words(number % size)}" if number % size else ""
            return f"{ONES[number // size]} {name}{rest}"
    return TENS[number // 10 - 2] + (f" {ONES[number % 10]}" if number % 10 else "")


def labels(text: str) -> list[int]:
    """The labels of the letters of ``text``."""
    return [1 + LETTERS.index(letter) for letter in text]


def text_of(path: Iterable[int]) -> str:
    """What CTC's labels, one for each frame, say: repetitions are one letter, then blanks are left out."""
    found, last = [], 0
    for label in path:
        if label not in (0, last):
            found.append(LETTERS[label - 1])
        last = label
    return "".join(found)


def spoken(text: str, voice: str, rate: int, pitch: int) -> NDArray[np.float32]:
    """The sound of ``text``, (samples,), between -1 and 1; ``rate`` is in words a minute, ``pitch`` from 0 to 99."""
    command = ["espeak-ng", "--stdout", "-v", voice, "-s", str(rate), "-p", str(pitch), text]
    # The length in the head of what goes to a pipe is not known: the rest is taken as it is.
    with wave.open(io.BytesIO(subprocess.run(command, capture_output=True, check=True).stdout)) as sound:
        raw = sound.readframes(sound.getnframes())
    return np.frombuffer(raw[: len(raw) // 2 * 2], "<i2").astype(np.float32) / np.float32(2**15)


def noisy(sound: NDArray[np.float32], decibels: float, draw: np.random.Generator) -> NDArray[np.float32]:
    """``sound`` with white noise, which is so many decibels weaker."""
    noise = draw.standard_normal(len(sound)) * np.sqrt(np.mean(sound**2)) * 10 ** (-decibels / 20)
    return (sound + noise).astype(np.float32)


@cache
def _filters(rate: int) -> NDArray[np.float32]:
    """Triangles on the mel scale, (BANDS, WINDOW // 2 + 1), for so many samples a second."""
    top = 2595 * np.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, BANDS + 2) / 2595) - 1)
    at = np.fft.rfftfreq(WINDOW, 1 / rate)
    rise = (at - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    fall = (edges[2:, None] - at) / (edges[2:] - edges[1:-1])[:, None]
    found: NDArray[np.float32] = np.clip(np.minimum(rise, fall), 0, None).astype(np.float32)
    return found


def features(sound: NDArray[np.float32], rate: int = SOUND) -> NDArray[np.float32]:
    """Of ``rate`` samples a second: logarithms of the energies in mel bands, (BANDS, frames), of mean 0 and variance 1
    in each band."""
    frames = np.lib.stride_tricks.sliding_window_view(sound, WINDOW)[::HOP]
    power = np.abs(np.fft.rfft(frames * np.hanning(WINDOW).astype(np.float32))) ** 2
    bands = np.log(_filters(rate) @ power.T.astype(np.float32) + 1e-3)
    return ((bands - bands.mean(1, keepdims=True)) / (bands.std(1, keepdims=True) + 1e-3)).astype(np.float32)


def _padded(found: list[NDArray]) -> NDArray:
    """Rows of the same length, filled with 0 at their ends."""
    length = max(one.shape[-1] for one in found)
    return np.stack([np.pad(one, [(0, 0)] * (one.ndim - 1) + [(0, length - one.shape[-1])]) for one in found])


def _recorded() -> dict[str, NDArray]:
    need(programs={"espeak-ng": "espeak-ng"})
    draw = np.random.default_rng(0)
    sounds, texts = [], []
    for number in draw.permutation(10_000)[: TRAIN + TEST].tolist():
        accent, variant = draw.choice(ACCENTS), draw.choice(VARIANTS)
        rate, pitch = int(draw.integers(170, 260)), int(draw.integers(30, 70))
        sound = spoken(in_words(number), f"{accent}{variant}", rate, pitch)
        sounds.append(features(noisy(sound, draw.uniform(*NOISE), draw)))
        texts.append(np.array(labels(in_words(number)), np.int64))
    return {"x": _padded(sounds), "y": _padded(texts)}


def _of_librispeech(folder: Path) -> Task:
    """Recordings whose texts CTC can say in their frames, two of which the network makes one."""
    both = []
    for recordings in own_data.recordings(folder):
        examples = [(features(sound, rate), np.array(labels(text), np.int64)) for text, sound, rate in recordings]
        both.append([(x, y) for x, y in examples if 0 < len(y) + (y[1:] == y[:-1]).sum() <= x.shape[1] // 2])
    x, y = (_padded([one[side] for one in (*both[0], *both[1])]) for side in (0, 1))
    train = len(both[0])
    return Task(x[:train], y[:train], x[train:], y[train:], len(LETTERS) + 1)


@cache
def data() -> Task:
    """Features (n, BANDS, frames), and labels (n, letters) with 0 after the last; no number is in both sets.
    LibriSpeech's, where it is."""
    if (folder := own_data.folder(own_data.LIBRISPEECH)) is not None:
        return _of_librispeech(folder)
    if not FILE.exists():
        FILE.parent.mkdir(parents=True, exist_ok=True)
        part = FILE.with_suffix(".part.npz")
        np.savez(part, **_recorded())  # type: ignore[arg-type]
        part.replace(FILE)
    with np.load(FILE) as found:
        x, y = found["x"], found["y"]
    return Task(x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:], len(LETTERS) + 1)


def jasper(classes: int, width: int = WIDTH) -> Any:
    """Jasper 2x2: two blocks of two convolutions with BatchNorm and ReLU, each with a residual connection; as Jasper,
    one convolution of stride 2 before them, and two after them, the last of which gives ``classes`` logits a frame."""
    from torch import nn

    def convolution(channels: int, out: int, size: int, stride: int = 1) -> list[Any]:
        padding = size // 2
        return [nn.Conv1d(channels, out, size, stride, padding, bias=False), nn.BatchNorm1d(out)]

    class Block(nn.Module):
        def __init__(self, channels: int, out: int, size: int) -> None:
            super().__init__()
            self.main = nn.Sequential(*convolution(channels, out, size), nn.ReLU(), *convolution(out, out, size))
            self.skip = nn.Sequential(*convolution(channels, out, 1))

        def forward(self, x: Any) -> Any:
            return (self.main(x) + self.skip(x)).relu()

    return nn.Sequential(
        *convolution(BANDS, width, 11, stride=2), nn.ReLU(),
        Block(width, width, 11), Block(width, width, 13),
        *convolution(width, 2 * width, 1), nn.ReLU(), nn.Conv1d(2 * width, classes, 1),
    )  # fmt: skip


def network() -> Any:
    """A new network for ``data``."""
    return jasper(len(LETTERS) + 1)


def loss(model: Any, x: NDArray, y: NDArray) -> Any:
    """CTC's (Graves et al. 2006), divided by the number of letters."""
    import torch
    from torch.nn.functional import ctc_loss

    found = model(torch.from_numpy(x)).log_softmax(1).permute(2, 0, 1)
    lengths = torch.full((len(x),), len(found))
    return ctc_loss(found, torch.from_numpy(y), lengths, torch.from_numpy((y > 0).sum(1)))


def recognised(model: Any, x: NDArray) -> list[str]:
    """The text of each example, by the likeliest label of each frame."""
    import torch

    with torch.no_grad():
        paths = model(torch.from_numpy(x)).argmax(1).tolist()
    return [text_of(path) for path in paths]


def quality(model: Any, task: Task) -> dict[str, float]:
    """Word and letter error rates of the tests, by jiwer: shares, which may be above 1."""
    need(modules=("jiwer",))
    from jiwer import cer, wer

    texts = ["".join(LETTERS[label - 1] for label in row if label) for row in task.test_y.tolist()]
    found = recognised(model, task.test_x)
    return {"wer": float(wer(texts, found)), "cer": float(cer(texts, found))}


PROBLEM = Problem(data, network, loss, quality)
