"""The problems of study 16: what is read, what is learned, how it is judged. Real data where Debian's packages are."""

import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))

from studies import __main__ as command
from studies import networks, own_data, problem, rates, speech, translation

ENGLISH = """\
Psalms 1:6: ¶ For the LORD knoweth the way of the righteous.

A Psalm of David.
   Psalms 3:1: LORD, how are they increased that
 trouble me!
I Kings 1:1: Now king David was old and stricken in years; and they covered him with clothes, but he gat no heat.
Jude 1:2: Mercy unto you.
(engKJV2006eb)
"""
SPANISH = """\
Psalms 1:6: Porque Jehová conoce <G5547> el camino.
Psalms 3:1: ¡Cuánto se han multiplicado!
I Kings 1:1: COMO el rey David era viejo, y entrado en días, cubríanle de vestidos, mas no se calentaba.
Jude 1:3: Amados.
(spaRV1909eb)
"""


def descend(model, loss, x, y, steps=30):
    """The first loss and the last."""
    torch.set_num_threads(1)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    found = []
    for _ in range(steps):
        found.append(loss(model, x, y))
        optimizer.zero_grad()
        found[-1].backward()
        optimizer.step()
    return found[0].item(), found[-1].item()


def test_verses_are_aligned_by_reference():
    english, spanish = translation.verses(ENGLISH), translation.verses(SPANISH)
    assert english["Psalms 3:1"] == "lord, how are they increased that trouble me!"
    assert english["Psalms 1:6"] == "for the lord knoweth the way of the righteous."
    assert translation.aligned(english, spanish, words=10) == [
        ("porque jehová conoce el camino.", english["Psalms 1:6"]),
        ("¡cuánto se han multiplicado!", english["Psalms 3:1"]),
    ]


def test_a_transformer_learns_to_copy_and_translates_until_the_end():
    torch.manual_seed(0)
    draw = np.random.default_rng(0)
    x = np.zeros((8, 7), np.int64)
    for row, size in zip(x, draw.integers(2, 6, len(x)), strict=True):
        row[: size + 2] = [translation.BEGIN, *draw.integers(3, 9, size), translation.END]
    model = translation.transformer(9, width=16, layers=1, heads=2)
    first, last = descend(model, translation.loss, x, x, steps=300)
    assert last < 0.1 < first
    found = list(translation.translated(model.eval(), x, 6))
    assert found == [[i for i in row if i > translation.END] for row in x.tolist()]


def test_padding_does_not_change_the_loss():
    model = translation.transformer(9, width=16, layers=1, heads=2).eval()
    x = np.array([[1, 4, 5, 2], [1, 6, 2, 0]])
    padded = np.pad(x, [(0, 0), (0, 3)])
    assert float(translation.loss(model, padded, padded)) == float(translation.loss(model, x, x))
    alone = [float(translation.loss(model, x[i : i + 1], x[i : i + 1])) for i in (0, 1)]
    assert float(translation.loss(model, x, x)) == pytest.approx((3 * alone[0] + 2 * alone[1]) / 5, rel=1e-5)


def test_ctc_decodes_repetitions_and_blanks():
    a, b = speech.labels("ab")
    assert speech.text_of([0, a, a, 0, a, b, b, 0]) == "aab"
    assert speech.text_of([]) == speech.text_of([0, 0]) == ""
    assert speech.text_of(speech.labels("one two")) == "one two"


def test_numbers_in_words():
    expected = {0: "zero", 13: "thirteen", 40: "forty", 305: "three hundred five", 7021: "seven thousand twenty one"}
    assert {number: speech.in_words(number) for number in expected} == expected
    assert len({speech.in_words(number) for number in range(10_000)}) == 10_000


def test_a_jasper_learns_in_a_few_steps():
    torch.manual_seed(0)
    draw = np.random.default_rng(0)
    y = np.array([speech.labels("one"), speech.labels("six"), [*speech.labels("no"), 0]])
    x = draw.standard_normal((3, speech.BANDS, 24)).astype(np.float32)
    model = speech.jasper(len(speech.LETTERS) + 1, width=16)
    first, last = descend(model, speech.loss, x, y)
    assert last < first / 2
    assert len(speech.recognised(model, x)) == 3


def test_features_are_normalised_and_as_long_as_the_sound():
    tone = np.sin(np.arange(speech.SOUND) * 0.2).astype(np.float32)
    found = speech.features(speech.noisy(tone, 10, np.random.default_rng(0)))
    assert found.shape == (speech.BANDS, (speech.SOUND - speech.WINDOW) // speech.HOP + 1)
    np.testing.assert_allclose(found.mean(1), 0, atol=1e-3)
    assert np.isfinite(speech.features(np.zeros(2000, np.float32))).all()


def test_what_is_missing_is_named():
    with pytest.raises(problem.MissingError, match="apt-get install one two"):
        problem.need(programs={"no-such-program": "two", "nor-this-one": "one"})
    with pytest.raises(problem.MissingError, match="no_such_module"):
        problem.need(modules=("no_such_module",))


def test_a_run_diverges_if_it_ends_above_where_exact_adam_stood_early():
    vgg = networks.NETWORKS[1]
    exact, run = (networks.run_of(vgg, way, 0) for way in networks.WAYS[:2])
    early = {f"loss at {vgg.kind.steps // networks.LOOKS}": 2.0}
    for loss, expected in ((2.3, True), (float("inf"), True), (1.0, False)):
        assert networks.diverged(run, {exact: {"loss": 0.1, **early}, run: {"loss": loss}}) is expected


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs Debian's espeak-ng")
def test_espeak_speaks():
    sound = speech.spoken("forty two", "en-us", 170, 50)
    assert 0.3 < len(sound) / speech.SOUND < 3
    assert 0.01 < np.abs(sound).max() <= 1


@pytest.mark.skipif(shutil.which("diatheke") is None, reason="needs Debian's diatheke")
@pytest.mark.parametrize("module", translation.PACKAGES)
def test_the_bible_has_all_verses(module):
    listed = subprocess.run(["diatheke", "-b", "system", "-k", "modulelist"], capture_output=True, text=True).stdout
    if module not in listed:
        pytest.skip(f"needs Debian's {translation.PACKAGES[module]}")
    assert len(translation.bible(module)) == 31_102


@pytest.fixture
def data_dir(tmp_path, monkeypatch):
    """A folder of one's own, which ``given`` is told of, and nothing that was read before."""

    def give(steps=None):
        for variable in own_data.VARIABLES.values():
            monkeypatch.setenv(variable, "")
        own_data.given(tmp_path, steps)

    caches = (rates.examples, translation.pairs, translation.vocabularies, translation.data, speech.data)
    for cached in caches:
        cached.cache_clear()
    yield give
    for cached in caches:
        cached.cache_clear()


def test_cifar_of_ones_own(data_dir, tmp_path):
    folder = tmp_path / own_data.CIFAR
    folder.mkdir()
    draw = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        images = draw.integers(0, 256, (20, 3072), np.uint8)
        (folder / name).write_bytes(pickle.dumps({b"data": images, b"labels": list(range(10)) * 2}))
    data_dir(steps=40)
    assert rates.examples("vgg").train_x.shape == (100, 3, 32, 32)
    assert rates.examples("digits").train_x.shape[1:] == (1, 8, 8)
    assert rates.network("vgg")(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert networks.NETWORKS[1].kind.steps == 40
    assert networks.NETWORKS[1].kind.rates == rates.TASKS["vgg"].rates
    assert own_data.apart() != ""


def test_sentences_of_ones_own(data_dir, tmp_path):
    folder = tmp_path / own_data.WMT
    folder.mkdir()
    long = "Wort " * 17
    (folder / "train.de").write_text(f"Ein  Haus .\n{long}\nZwei\n\n")
    (folder / "train.en").write_text("A house .\nshort\nTwo\nthree\n")
    for language, text in (("de", "Drei\n"), ("en", "Three\n")):
        (folder / f"newstest2014.{language}").write_text(text)
    data_dir()
    assert translation.pairs() == ([("ein haus .", "a house ."), ("zwei", "two")], [("drei", "three")])
    translation.pairs.cache_clear()
    (folder / "train.en").write_text("A house .\n")
    with pytest.raises(problem.MissingError, match="different numbers of lines"):
        translation.pairs()
    (folder / "train.en").unlink()
    with pytest.raises(problem.MissingError, match=r"train\.en missing"):
        translation.pairs()


def test_recordings_of_ones_own(data_dir, tmp_path):
    soundfile = pytest.importorskip("soundfile", reason="needs requirements/studies.txt")
    draw = np.random.default_rng(0)
    for part, seconds in (("train-clean-100", (2.0, 7.0, 0.1)), ("test-clean", (1.5,))):
        chapter = tmp_path / own_data.LIBRISPEECH / part / "19" / "198"
        chapter.mkdir(parents=True)
        lines = []
        for number, length in enumerate(seconds):
            name = f"19-198-{number:04d}"
            soundfile.write(chapter / f"{name}.flac", 0.1 * draw.standard_normal(int(16000 * length)), 16000)
            lines.append(f"{name} IT'S ME\n")
        (chapter / "19-198.trans.txt").write_text("".join(lines))
    data_dir()
    found = speech.data()  # without the one that is too long, and the one that is too short for its text
    assert len(found.train_x) == len(found.test_x) == 1
    assert speech.text_of(found.train_y[0]) == "its me"
    shutil.rmtree(tmp_path / own_data.LIBRISPEECH / "test-clean")
    speech.data.cache_clear()
    with pytest.raises(problem.MissingError, match="test-clean"):
        speech.data()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["networks", "--data-dir", "/nowhere"], "has none of the folders cifar-10-batches-py, wmt14, LibriSpeech"),
        (["rates", "--steps", "20"], "are for `python -m studies networks`"),
        (["--steps", "20"], "are for `python -m studies networks`"),
        (["networks", "--steps", "3"], "expected 10 steps at least"),
    ],
)
def test_wrong_data_or_steps(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["studies", *arguments])
    with pytest.raises(SystemExit):
        command.main()
    assert message in capsys.readouterr().err
