"""A Transformer, encoder and decoder, that translates the Bible from Spanish into English, verse by verse.

The King James Version and the Reina-Valera of 1909 come as Debian's packages sword-text-kjv and sword-text-sparv, and
``diatheke``, of the package of that name, reads them: apt-get install sword-text-kjv sword-text-sparv diatheke.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jobs.data import Task
from studies import own_data
from studies.problem import MissingError, Problem, need

ENGLISH, SPANISH = "engKJV2006eb", "spaRV1909eb"
PACKAGES = {ENGLISH: "sword-text-kjv", SPANISH: "sword-text-sparv"}
BIBLE = "Gen 1:1-Rev 22:21"
WORDS = 16
"""Of the longest verses that are taken, in either language."""
TOGETHER, APART = 2000, 4000
"""Byte pairs: of both languages together, or of each language apart."""
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
    """To train on, and to test with; no verse of the second is in the first. WMT-14's, from German, where it is."""
    if (folder := own_data.folder(own_data.WMT)) is not None:
        return own_data.wmt(folder, WORDS, TEST_PAIRS)
    found = list(dict.fromkeys(aligned(bible(ENGLISH), bible(SPANISH))))
    order = np.random.default_rng(0).permutation(len(found))
    test = [found[i] for i in order[:TEST_PAIRS]]
    known = {verse for pair in test for verse in pair}
    return [found[i] for i in order[TEST_PAIRS:] if not known & set(found[i])], test


def learned(texts: list[str], size: int) -> Any:
    """A vocabulary of byte pairs (Sennrich et al. 2016)."""
    need(modules=("tokenizers",))
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, size, special_tokens=["<pad>", "<begin>", "<end>"], show_progress=False)
    return tokenizer


@cache
def vocabularies(apart: bool) -> tuple[Any, Any]:
    """Of Spanish and of English, in the verses to train on; one for both unless they are ``apart``."""
    train = pairs()[0]
    if not apart:
        return (learned([verse for pair in train for verse in pair], TOGETHER),) * 2
    spanish, english = (learned([pair[side] for pair in train], APART) for side in (0, 1))
    return spanish, english


def rows(texts: list[str], tokenizer: Any) -> NDArray[np.int64]:
    """A row of tokens for each text, from BEGIN to END, and PAD after it."""
    found = [[BEGIN, *tokenizer.encode(text).ids, END] for text in texts]
    padded = np.full((len(found), max(map(len, found))), PAD, np.int64)
    for row, ids in zip(padded, found, strict=True):
        row[: len(ids)] = ids
    return padded


@cache
def data(apart: bool = False) -> Task:
    """Rows of Spanish, and of English."""
    (train_x, train_y), (test_x, test_y) = (
        [rows([pair[side] for pair in some], tokens) for side, tokens in enumerate(vocabularies(apart))]
        for some in pairs()
    )
    return Task(train_x, train_y, test_x, test_y, vocabularies(apart)[1].get_vocab_size())


def transformer(
    tokens: int, width: int = WIDTH, layers: int = LAYERS, heads: int = HEADS, *, apart: bool = False
) -> Any:
    """Vaswani et al. 2017, with one matrix for both embeddings and the output unless these are ``apart``.

    Norms come before blocks. There is no dropout, whose draws would depend on the order in which workers run.
    """
    import torch
    from torch import nn

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = [nn.Embedding(tokens, width) for _ in range(3 if apart else 1)]
            for embedding in made:
                nn.init.normal_(embedding.weight, std=width**-0.5)
            self.embeddings = nn.ModuleList(made)
            options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
            encoder = nn.TransformerEncoderLayer(width, heads, 4 * width, **options)  # type: ignore[arg-type]
            decoder = nn.TransformerDecoderLayer(width, heads, 4 * width, **options)  # type: ignore[arg-type]
            self.encoder = nn.TransformerEncoder(encoder, layers, nn.LayerNorm(width), enable_nested_tensor=False)
            self.decoder = nn.TransformerDecoder(decoder, layers, nn.LayerNorm(width))
            for parameter in [*self.encoder.parameters(), *self.decoder.parameters()]:
                if parameter.ndim > 1:
                    nn.init.xavier_uniform_(parameter)

        def embedded(self, ids: Any, which: int) -> Any:
            place = torch.arange(ids.shape[1])[:, None] * torch.exp(
                torch.arange(0, width, 2) * (-math.log(10000.0) / width)
            )
            waves = torch.stack([place.sin(), place.cos()], 2).flatten(1)
            return self.embeddings[which](ids) * width**0.5 + waves

        def encode(self, x: Any) -> Any:
            return self.encoder(self.embedded(x, 0), src_key_padding_mask=x == PAD)

        def decode(self, memory: Any, x: Any, y: Any) -> Any:
            later = torch.ones(y.shape[1], y.shape[1], dtype=torch.bool).triu(1)
            h = self.decoder(
                self.embedded(y, -2 if apart else 0), memory, tgt_mask=later, memory_key_padding_mask=x == PAD
            )
            return h @ self.embeddings[-1].weight.T

        def forward(self, x: Any, y: Any) -> Any:
            return self.decode(self.encode(x), x, y)

    return Transformer()


def network(apart: bool = False) -> Any:
    """A new Transformer for ``data``."""
    return transformer(data(apart).classes, apart=apart)


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


def quality(model: Any, task: Task, apart: bool = False) -> dict[str, float]:
    """BLEU of the tests' translations by sacrebleu, in percent."""
    need(modules=("sacrebleu",))
    from sacrebleu import corpus_bleu

    texts = [vocabularies(apart)[1].decode(ids) for ids in translated(model, task.test_x, task.test_y.shape[1])]
    return {"bleu": corpus_bleu(texts, [[english for _, english in pairs()[1]]]).score}


PROBLEM = Problem(data, network, loss, quality)
PROBLEM_APART = Problem(partial(data, apart=True), partial(network, apart=True), loss, partial(quality, apart=True))
