"""Study 16: the paper's four networks by name, a ResNet, a VGG, a Transformer that translates, and Jasper.

Needs requirements/studies.txt, and Debian's packages of ``studies.translation`` and ``studies.speech``; or the paper's
own data: ``studies.own_data``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import mean

from horovod_onebit.recipe import Recipe
from studies import lamb, own_data, pool, report, speech, translation
from studies.language import WORKERS, float32
from studies.problem import MissingError, need
from studies.rates import (
    SEEDS,
    Cell,
    Kind,
    Result,
    beside,
    examples,
    in_a_name,
    kept,
    kind_of,
    measured,
    network,
    train,
)
from studies.recipes import PRESETS

ROBUST = replace(PRESETS["robust"], exchange="direct")
OF_PAPER = {
    "resnet": own_data.CIFAR,
    "vgg": own_data.CIFAR,
    "translation": own_data.WMT,
    "translation apart": own_data.WMT,
    "speech": own_data.LIBRISPEECH,
}
"""The data that the paper used, by the task."""
HEAD = ["network", "", "seeds", "exact steps", "test loss, above exact", "quality", "MB sent (times fewer)", "diverged"]
LOOKS = 10
"""At the test loss of a run, on its way."""
TITLE = "## 16. The paper's four networks"
INTRODUCTION = (
    "The paper trains a ResNet, a VGG, a Transformer that translates and Jasper, which recognises speech; as "
    "published, the algorithm diverges on the VGG and the Transformer. Here are all four, small enough for two "
    "cores. {resnet} and {vgg} classify scikit-learn's digits, enlarged to 32x32. {transformer} translates "
    "{verses:,} short verses of the Bible from Spanish into English; both languages share byte pairs, and one "
    "matrix serves both embeddings and the output. {apart} is the same with byte pairs and a matrix for each. "
    "{jasper} recognises numbers below 10,000 that espeak-ng speaks in {voices} voices, in noise. For these data: "
    "`apt-get install {packages}`, and `pip install -r requirements/studies.txt`.\n\n"
    "Adam, {workers} simulated workers with {batch} examples each, means of the seeds from 0; in brackets, the loss "
    "beside that of exact Adam with the same seeds. `robust` exchanges directly, the others in two stages. `after 20"
    " %` is the middle of what the paper recommends for the warm-up; `robust` alone has an exact warm-up whose "
    'length is "auto", and with `warmup="three_bit"` it is the default. All recipes leave tensors of fewer than '
    "1,024 elements uncompressed. The rates are those at which exact Adam's quality was best of three ({tried}); for"
    " the ResNet and the VGG those of studies 11 and 6, and for the second Transformer that of the first. BLEU is "
    "sacrebleu's, of 300 verses, and words wrong are jiwer's, of 300 numbers, both of greedy decoding. A run has "
    "diverged if its test loss is not finite, or ends above where exact Adam stood after a tenth of the steps."
)
CONCLUSION = (
    "What to see: `paper` and `fixed` are lost on the VGG, and `paper` is on the Transformer with vocabularies apart "
    "if it compresses after 20 steps; `robust` diverges nowhere.\n\n"
    'With a warm-up whose length is "auto", `robust` ends within 0.3 BLEU and 0.5 % of the loss of exact Adam on the '
    "Transformers, or better; in three bits, with 0.4 and 0.6 % more loss and 0.1 and 0.9 BLEU more. On the others "
    "150 to 220 of 300 steps are the warm-up. If it is exact, `robust` is within half a point there, with 1.9 to 2.9 "
    "% more loss; in three bits, the ResNet and the VGG are within half a point, too (3 and 6 % more loss; with five "
    "and eight seeds 6 % less and 4 % more: study 12), and Jasper is not with these three seeds: of twelve, as many "
    "words are wrong as after an exact warm-up. After 20 % of the steps it misses the target on the ResNet, on "
    "Jasper, and by 0.6 BLEU on the first Transformer, and after 20 steps on all networks; `paper` and `fixed` after "
    "20 % miss it on the ResNet and Jasper alike. After 20 % of the steps, where they do not diverge, `fixed` ends as "
    "well as `robust` or better (ResNet 98.7 % right in place of 98.3, Transformers 0.9 and 0.6 BLEU more), and so "
    "does `paper` (98.8 %, 1.0 BLEU more), but for the second Transformer (1.0 BLEU less). Unlike in the paper, "
    "`paper` does not diverge on a Transformer with one matrix for both languages. Seeds differ: exact Adam has 3.0 "
    "to 16.6 % words wrong on Jasper (16.9 % in the mean of twelve seeds, one bit after an exact warm-up 17.7 %: "
    "study 12), and 9.8 to 12.0 BLEU on the first Transformer. For Jasper, 0.032 was tried with the first seed only: "
    "3.9 % words wrong, 3.0 % at 0.016."
)


@dataclass(frozen=True)
class Network:
    """One of the paper's, with the rate of ``tried`` at which exact Adam's quality was best."""

    name: str
    task: str
    rate: float
    quality: str
    what: str
    tried: tuple[float, ...] = ()
    tried_with: tuple[int, ...] = SEEDS[:1]
    seeds: tuple[int, ...] = SEEDS

    @property
    def kind(self) -> Kind:
        return kind_of(self.task)


NETWORKS = [
    Network("ResNet-18", "resnet", 2e-3, "accuracy", "right"),
    Network("VGG16", "vgg", 1e-3, "accuracy", "right"),
    Network("Transformer", "translation", 8e-3, "bleu", "BLEU", (4e-3, 8e-3, 1.6e-2)),
    Network("Transformer, vocabularies apart", "translation apart", 8e-3, "bleu", "BLEU", seeds=SEEDS[:2]),
    Network("Jasper", "speech", 1.6e-2, "wer", "words wrong", (4e-3, 8e-3, 1.6e-2), SEEDS),
]


@dataclass(frozen=True)
class Way:
    """A row of the table; ``warmup`` exact steps, a share of all if it is below 1, None if all are exact."""

    text: str
    warmup: float | str | None = None
    recipe: Recipe = ROBUST
    seeds: tuple[int, ...] = SEEDS


EXACT, DEFAULT = Way("exact Adam"), Way("`robust`", "auto")
OF_OTHERS = ("resnet", "vgg")
"""Tasks of which studies 6 and 11 keep some runs."""
SHARE = 0.2
"""Of the steps: the middle of what the paper recommends for the warm-up."""
WAYS = [
    EXACT,
    Way("`paper`, after 20 %", SHARE, PRESETS["paper"]),
    Way("`paper`, after 20 steps", 20, PRESETS["paper"], seeds=SEEDS[:1]),
    Way("`fixed`, after 20 %", SHARE, PRESETS["fixed"]),
    Way("`robust`, after 20 %", SHARE),
    Way("`robust`, after 20 steps", 20),
    DEFAULT,
    Way('`robust`, `warmup="three_bit"`', "auto", replace(ROBUST, warmup="three_bit")),
]
STYLES = {
    "exact Adam": "k-",
    "`paper`, after 20 steps": "C3-.",
    "`paper`, after 20 %": "C3:",
    "`fixed`, after 20 %": "C1--",
    "`robust`, after 20 steps": "C0-.",
    "`robust`, after 20 %": "C0-",
}


@dataclass(frozen=True)
class Run:
    """One run of the study."""

    network: Network
    way: Way
    seed: int
    rate: float


def seeds_of(one: Network, way: Way) -> list[int]:
    """The seeds of a row."""
    return [seed for seed in one.seeds if seed in way.seeds]


def run_of(one: Network, way: Way, seed: int) -> Run:
    """A run of the table."""
    return Run(one, way, seed, one.rate)


def steps_of(run: Run) -> int | str | None:
    """The steps of warm-up."""
    warmup = run.way.warmup
    return round(warmup * run.network.kind.steps) if isinstance(warmup, float) else warmup


def result(run: Run) -> Result:
    """The result of ``run``, with the test loss LOOKS times on its way, unless studies 6 and 11 have it without."""
    task, steps = run.network.task, run.network.kind.steps
    cell = Cell(task, WORKERS, run.rate, steps_of(run), run.seed)
    if task in OF_OTHERS and run.way in (EXACT, DEFAULT) and run.seed != SEEDS[0]:
        return measured(cell)
    name = f"networks/{task}-{in_a_name(run.way.text)}-{run.rate:g}-{run.seed}"
    return kept(name, lambda: train(cell, run.way.recipe, look=steps // LOOKS))


def diverged(run: Run, found: dict[Run, Result]) -> bool:
    """Whether the test loss of ``run`` ends above exact Adam's after the first tenth of the steps."""
    loss, exact = found[run]["loss"], found[run_of(run.network, EXACT, SEEDS[0])]
    return not math.isfinite(loss) or loss > exact[f"loss at {run.network.kind.steps // LOOKS}"]


def _quality(one: Network, results: list[Result]) -> float:
    """The mean, in percent, or points of BLEU."""
    return mean(each[one.quality] for each in results) * (1 if one.quality == "bleu" else 100)


def _text(one: Network, value: float) -> str:
    return f"{value:.1f} BLEU" if one.quality == "bleu" else f"{value:.1f} % {one.what}"


def megabytes(one: Network, way: Way, results: list[Result]) -> float:
    """That a worker sends in a run; float32 gradients travel in a ring."""
    size = sum(p.numel() for p in network(one.task).parameters())
    bits = float32(WORKERS) if way.warmup is None else mean(each["bits"] for each in results)
    return bits * size * one.kind.steps / 8e6


def _rows(found: dict[Run, Result], one: Network) -> Iterator[list[str]]:
    for way in WAYS:
        runs = [run_of(one, way, seed) for seed in seeds_of(one, way)]
        results = [found[run] for run in runs]
        exact = [found[run_of(one, EXACT, run.seed)]["loss"] for run in runs]
        gone = sum(diverged(run, found) for run in runs)
        loss, sent = mean(each["loss"] for each in results), megabytes(one, way, results)
        fewer = megabytes(one, EXACT, results) / sent
        yield [
            one.name,
            way.text,
            str(len(runs)),
            "all" if way.warmup is None else f"{mean(each['exact_steps'] for each in results):.0f}",
            f"{loss:.3f}" if way == EXACT else beside(loss, mean(exact)),
            _text(one, _quality(one, results)),
            f"{sent:.1f} ({fewer:.1f})",
            f"{gone} of {len(runs)}" if gone else "no",
        ]


def reached(one: Network, found: dict[Run, Result], way: Way) -> str:
    """How ``way`` ends beside exact Adam, and whether that is within half a point, 0.3 BLEU, and 0.5 % of the loss."""
    results, exact = ([found[run_of(one, each, seed)] for seed in one.seeds] for each in (way, EXACT))
    loss = 100 * (mean(each["loss"] for each in results) / mean(each["loss"] for each in exact) - 1)
    points = _quality(one, results) - _quality(one, exact)
    worse = points if one.quality == "wer" else -points
    met = (loss <= 0.5, worse <= (0.3 if one.quality == "bleu" else 0.5))
    unit = "BLEU" if one.quality == "bleu" else f"points of {'words wrong' if one.quality == 'wer' else 'accuracy'}"
    verdict = {(True, True): "both within", (False, True): "the loss is not", (True, False): "the quality is not"}
    return f"{loss:+.1f} % of loss, {points:+.1f} {unit} ({verdict.get(met, 'neither is')})"


def _curves(found: dict[Run, Result]) -> str:
    """Test loss by step, of the first seed."""
    figure, panels = report.axes(ncols=len(NETWORKS), figsize=(16, 3.4))
    for panel, one in zip(panels, NETWORKS, strict=True):
        every = one.kind.steps // LOOKS
        steps = range(every, one.kind.steps + 1, every)
        for way in WAYS:
            if way.text in STYLES:
                run = found[run_of(one, way, SEEDS[0])]
                losses = [min(run[f"loss at {step}"], 1e3) for step in steps]
                panel.plot(steps, losses, STYLES[way.text], label=way.text.replace("`", ""))
        panel.axvline(SHARE * one.kind.steps, color="0.7", lw=0.8, zorder=0)
        panel.set(yscale="log", xlabel="step")
        panel.set_title(one.name, fontsize=10)
    panels[0].set(ylabel="test loss")
    panels[0].legend(fontsize=7)
    return report.save(figure, "networks")


def _tried(found: dict[Run, Result], one: Network) -> str:
    texts = []
    for rate in one.tried:
        results = [found[Run(one, EXACT, seed, rate)] for seed in one.tried_with]
        loss = mean(each["loss"] for each in results)
        texts.append(f"{_text(one, _quality(one, results))} and a test loss of {loss:.3f} at {rate:g}")
    return f"{one.name}, {'first seed' if len(one.tried_with) == 1 else 'all seeds'}: {', '.join(texts)}"


def of_own_data() -> str:
    """A table of the networks whose data ``--data-dir`` has, if it was given, or else ``--steps``."""
    found_in = {one: own_data.folder(OF_PAPER[one.task]) for one in NETWORKS}
    chosen = [one for one in NETWORKS if found_in[one]] or NETWORKS
    found = pool.results(result, [run_of(one, way, s) for one in chosen for way in WAYS for s in seeds_of(one, way)])
    told = []
    for one in chosen:
        data = examples(one.task)
        name = own_data.NAMES[OF_PAPER[one.task]] if found_in[one] else "as on the page"
        told.append(
            f"- {one.name}: {name}, {len(data.train_x):,} examples to train on and {len(data.test_x):,} to test with, "
            f"{one.kind.steps:,} steps of {one.kind.batch} examples, rate {one.rate:g}"
        )
    text = [
        f"{TITLE}, with other data or steps",
        "The networks, their rates and the methods are those of the page; rates were not tried again for these data.",
        "\n".join(told),
        report.table(HEAD, (row for one in chosen for row in _rows(found, one))),
    ]
    return "\n\n".join(text) + "\n"


def run() -> str:
    """The section of the page, or which packages it needs."""
    try:
        need(modules=("jiwer", "sacrebleu", "transformers"))
        if own_data.apart():
            return of_own_data()
        verses = len(examples("translation").train_x)
        examples("speech")
    except MissingError as error:
        return f"{TITLE}\n\nSkipped: {error}\n"
    tried = [Run(one, EXACT, seed, rate) for one in NETWORKS for rate in one.tried for seed in one.tried_with]
    table = [run_of(one, way, seed) for one in NETWORKS for way in WAYS for seed in seeds_of(one, way)]
    found = pool.results(result, dict.fromkeys([*tried, *table]))
    sizes = {one.name: 1e-6 * sum(p.numel() for p in network(one.task).parameters()) for one in NETWORKS}
    targets = [
        f"- {one.name}: " + "; ".join(f"{way.text} {reached(one, found, way)}" for way in WAYS if "robust" in way.text)
        for one in NETWORKS
    ]
    text = [
        TITLE,
        INTRODUCTION.format(
            verses=verses,
            packages=" ".join([*translation.PACKAGES.values(), "diatheke", "espeak-ng"]),
            voices=len(speech.ACCENTS) * len(speech.VARIANTS),
            workers=WORKERS,
            batch=NETWORKS[0].kind.batch // WORKERS,
            tried="; ".join(_tried(found, one) for one in NETWORKS if one.tried),
            **{
                name: f"{one.name} ({sizes[one.name]:.2f} M parameters, {one.kind.steps:,} steps, rate {one.rate:g})"
                for name, one in zip(("resnet", "vgg", "transformer", "apart", "jasper"), NETWORKS, strict=True)
            },
        ),
        _curves(found),
        CONCLUSION,
        report.table(HEAD, (row for one in NETWORKS for row in _rows(found, one))),
        "`robust` beside exact Adam, and whether it is within 0.5 % of the loss and half a point (0.3 BLEU):",
        "\n".join(targets),
        lamb.section(),
    ]
    return "\n\n".join(text) + "\n"
