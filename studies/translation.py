"""A Transformer, encoder and decoder, that translates the Bible from Spanish into English, verse by verse.

The King James Version and the Reina-Valera of 1909 come as Debian's packages sword-text-kjv and sword-text-sparv, and
``diatheke``, of the package of that name, reads them: apt-get install sword-text-kjv sword-text-sparv diatheke.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jobs.data import Task
from studies.problem import MissingError, Problem, need

ENGLISH, SPANISH = "engKJV2006eb", "spaRV1909eb"
PACKAGES = {ENGLISH: "sword-text-kjv", SPANISH: "sword-text-sparv"}
BIBLE = "Gen 1:1-Rev 22:21"
WORDS = 16
"""Of the longest verses that are taken, in either language."""
VOCABULARY = 2000
"""Byte pairs, of both languages together."""
PAD, BEGIN, END = 0, 1, 2
TEST_PAIRS = 300
WIDTH, LAYERS, HEADS = 64, 2, 4


def verses(text: str) -> dict[str, str]:
    """The verses of ``text``, as diatheke prints them, by reference: "Genesis 1:1"; in small letters, without marks."""
    found: dict[str, str] = {}
    reference = ""
    for line in map(str.strip, text.splitlines()):
        if match := re.match(r"((?:[1-3] )?[A-Z][A-Za-z ]* \d+:\d+):(.*)", line):
            reference, line = match.groups()
            found[reference] = ""
        elif not line or line.startswith("("):  # titles, and last the name of the text
            reference = ""
        if reference:
            found[reference] = f"{found[reference]} {line}"
    return {name: " ".join(re.sub(r"<[^>]*>|¶", " ", verse).lower().split()) for name, verse in found.items()}


def aligned(english: Mapping[str, str], spanish: Mapping[str, str], words: int = WORDS) -> list[tuple[str, str]]:
    """Spanish and English of each verse that both have, if neither has more than ``words`` words."""
    both = [(spanish[name], english[name]) for name in english if spanish.get(name) and english[name]]
    return [pair for pair in both if max(len(verse.split()) for verse in pair) <= words]


def bible(module: str) -> dict[str, str]:
    """The verses of a module of SWORD's."""
    need(programs={"diatheke": "diatheke"})
    command = ["diatheke", "-b", module, "-f", "plain", "-k", BIBLE]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if not (found := verses(text)):
        raise MissingError(f"diatheke has no {module}: apt-get install {PACKAGES[module]}")
    return found


@cache
def pairs() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """To train on, and to test with; no verse of the second is in the first."""
    found = list(dict.fromkeys(aligned(bible(ENGLISH), bible(SPANISH))))
    order = np.random.default_rng(0).permutation(len(found))
    test = [found[i] for i in order[:TEST_PAIRS]]
    known = {verse for pair in test for verse in pair}
    return [found[i] for i in order[TEST_PAIRS:] if not known & set(found[i])], test


def learned(texts: list[str], size: int = VOCABULARY) -> Any:
    """A vocabulary of byte pairs (Sennrich et al. 2016)."""
    need(modules=("tokenizers",))
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, size, special_tokens=["<pad>", "<begin>", "<end>"], show_progress=False)
    return tokenizer


@cache
def vocabulary() -> Any:
    """Of the verses to train on."""
    return learned([verse for pair in pairs()[0] for verse in pair])


def rows(texts: list[str], tokenizer: Any) -> NDArray[np.int64]:
    """A row of tokens for each text, from BEGIN to END, and PAD after it."""
    found = [[BEGIN, *tokenizer.encode(text).ids, END] for text in texts]
    padded = np.full((len(found), max(map(len, found))), PAD, np.int64)
    for row, ids in zip(padded, found, strict=True):
        row[: len(ids)] = ids
    return padded


@cache
def data() -> Task:
    """Rows of Spanish, and of English."""
    train, test = pairs()
    (train_x, train_y), (test_x, test_y) = (
        [rows([pair[side] for pair in some], vocabulary()) for side in (0, 1)] for some in (train, test)
    )
    return Task(train_x, train_y, test_x, test_y, vocabulary().get_vocab_size())


def transformer(tokens: int, width: int = WIDTH, layers: int = LAYERS, heads: int = HEADS) -> Any:
    """Vaswani et al. 2017: one matrix for both embeddings and the output, sines for positions; norms before blocks, no
    dropout, whose draws would depend on the order in which simulated workers run."""
    import torch
    from torch import nn

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(tokens, width)
            nn.init.normal_(self.embedding.weight, std=width**-0.5)
            options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
            encoder = nn.TransformerEncoderLayer(width, heads, 4 * width, **options)  # type: ignore[arg-type]
            decoder = nn.TransformerDecoderLayer(width, heads, 4 * width, **options)  # type: ignore[arg-type]
            self.encoder = nn.TransformerEncoder(encoder, layers, nn.LayerNorm(width), enable_nested_tensor=False)
            self.decoder = nn.TransformerDecoder(decoder, layers, nn.LayerNorm(width))
            for parameter in [*self.encoder.parameters(), *self.decoder.parameters()]:
                if parameter.ndim > 1:
                    nn.init.xavier_uniform_(parameter)

        def embedded(self, ids: Any) -> Any:
            place = torch.arange(ids.shape[1])[:, None] * torch.exp(
                torch.arange(0, width, 2) * (-math.log(10000.0) / width)
            )
            waves = torch.stack([place.sin(), place.cos()], 2).flatten(1)
            return self.embedding(ids) * width**0.5 + waves

        def encode(self, x: Any) -> Any:
            return self.encoder(self.embedded(x), src_key_padding_mask=x == PAD)

        def decode(self, memory: Any, x: Any, y: Any) -> Any:
            later = torch.ones(y.shape[1], y.shape[1], dtype=torch.bool).triu(1)
            h = self.decoder(self.embedded(y), memory, tgt_mask=later, memory_key_padding_mask=x == PAD)
            return h @ self.embedding.weight.T

        def forward(self, x: Any, y: Any) -> Any:
            return self.decode(self.encode(x), x, y)

    return Transformer()


def network() -> Any:
    """A new Transformer for ``data``."""
    return transformer(data().classes)


def _filled(ids: NDArray) -> Any:
    """``ids`` as a tensor, without the columns that are all PAD."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(ids[:, : max(1, int((ids != PAD).sum(1).max()))]))


def loss(model: Any, x: NDArray, y: NDArray) -> Any:
    """Mean cross entropy of a token, END included."""
    from torch.nn.functional import cross_entropy

    ids = _filled(y)
    logits = model(_filled(x), ids[:, :-1])
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PAD)


def translated(model: Any, x: NDArray, length: int) -> Iterator[list[int]]:
    """The likeliest tokens for each row of ``x``, one after the other, at most ``length``, up to END."""
    import torch

    source = _filled(x)
    with torch.no_grad():
        memory = model.encode(source)
        ids = torch.full((len(x), 1), BEGIN)
        while ids.shape[1] <= length and not bool((ids == END).any(1).all()):
            ids = torch.cat([ids, model.decode(memory, source, ids)[:, -1:].argmax(2)], 1)
    for row in ids[:, 1:].tolist():
        yield row[: row.index(END)] if END in row else row


def quality(model: Any, task: Task) -> dict[str, float]:
    """BLEU of the tests' translations by sacrebleu, in percent."""
    need(modules=("sacrebleu",))
    from sacrebleu import corpus_bleu

    texts = [vocabulary().decode(ids) for ids in translated(model, task.test_x, task.test_y.shape[1])]
    return {"bleu": corpus_bleu(texts, [[english for _, english in pairs()[1]]]).score}


PROBLEM = Problem(data, network, loss, quality)
