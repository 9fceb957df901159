"""``python -m studies`` runs all and writes docs/studies.md; with names, it prints those sections only."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from studies import (
    clock,
    early,
    few_bits,
    fine_tuning,
    frozen,
    images,
    language,
    large,
    local,
    lora,
    magnitudes,
    moments,
    networks,
    of_deepspeed,
    own_data,
    paraboloid,
    published,
    quadratics,
    rates,
    report,
    stages,
    tuned,
    zero_one,
)
from studies.problem import MissingError

STUDIES: dict[str, Callable[[], str]] = {
    "paraboloid": paraboloid.run,
    "early": early.run,
    "magnitudes": magnitudes.run,
    "quadratics": quadratics.run,
    "published": published.run,
    "rates": rates.run,
    "moments": moments.run,
    "stages": stages.run,
    "local": local.run,
    "language": language.run,
    "images": images.run,
    "few bits": few_bits.run,
    "frozen": frozen.run,
    "deepspeed": of_deepspeed.run,
    "fine-tuning": fine_tuning.run,
    "networks": networks.run,
    "zero-one": zero_one.run,
    "tuned": tuned.run,
    "large": large.run,
    "lora": lora.run,
    "clock": clock.run,
}
HEAD = """# Studies

These studies reproduce what "the paper" found ([Tarasov and Ershov 2022](https://doi.org/10.18721/JCSTCS.15407)) and
measure what removes the cause. Made by `python -m studies` on {machine}. They were run before elements that have
never had a gradient [stayed where they are](gradients.md#elements-that-have-no-gradient); of the digits' first
layers, weights of pixels that are always black are such elements. Newer are studies 17 to 21, in study 12 `vgg`,
`vit`, `speech`, `language` and the other optimizers, LAMB in study 16, and all rows in few bits of studies 12, 15,
16, 17 and 20; study 19 ran on a GPU. These rows are older, or from another machine: in study 6 those of 16 workers,
whose servers did not yet subtract the momentum that all workers know; in study 19 that in three bits, which had
blocks of 1,024 elements and kept all errors; in study 10 those from `exact, other machine` on, compared with that
row. If you have CIFAR-10, WMT-14 or LibriSpeech, train the networks of study 16 on them: `python -m studies networks
--data-dir DIR --steps 20000` (what DIR holds: `studies/own_data.py`).

| name | meaning |
|---|---|
| `exact`, `none` | no compression |
| `paper` | 1-bit Adam as published |
| `fixed` | the same with epsilon under the root |
| `robust` | the default of this project; its warm-up is exact here unless a study says otherwise |

| study | question | answer |
|---|---|---|
| 1 | Does compressed Adam diverge on a function of two variables? | Only as the paper prints the algorithm |
| 2 | How early may compression start? | `robust`: after 24 of 300 steps, if rates are moderate; `paper` diverges |
| 3 | Why does the published algorithm diverge? | Magnitudes differ by orders within one tensor |
| 4 | What if gradients differ in magnitude? | `paper` and `fixed` diverge; `robust`: at worst 12 times the loss |
| 5 | Is `paper` really the published algorithm? | Yes, bit for bit |
| 6 | Which learning rate, how long a warm-up? | `"auto"`: at most 210 steps after the rate has risen |
| 7 | Should the second moment be updated later? | Not after a warm-up of 200 steps |
| 8 | What does a second stage cost? | 0.2 to 0.3 % of the loss |
| 9 | What do local steps cost? | With Adam and 4 workers nothing on text; with 16 workers or in short runs, some |
| 10 | Does it hold for a language model of 0.4 M? | Yes: 0.7 % below exact Adam; PowerSGD of rank 4 ends 7 % above |
| 11 | A ResNet and a vision transformer? | Both learn as with exact Adam; `paper` fails on the second |
| 12 | May the warm-up's gradients travel in few bits? | In three: yes on text; three networks end 4 to 14 % higher |
| 13 | Why does one bit end below exact Adam? | Its second moment is frozen: without compression it ends there, too |
| 14 | Does DeepSpeed's own 1-bit Adam train a VGG? | No, nor does `paper` |
| 15 | Fine-tuning, 500 steps? | As with exact Adam, from 50 steps of warm-up in three bits |
| 16 | The paper's four networks? | `paper` loses the VGG; `robust` is within half a point, on Jasper 0.8 |
| 17 | 0/1 Adam's gradients in three bits? | 3 to 5 % less loss at equal bytes, 6 % if they renew the second moment |
| 18 | DiLoCo and PowerSGD, tuned? | 19 and 10 % above exact Adam; `Local(freeze=200)` 0.9 % |
| 19 | A GPT of 9 M parameters, 5,120 steps? | One bit 1.2 % above exact Adam; `Local()` 1.9 %, 197 times fewer bytes |
| 20 | LoRA? Clipping? float16? | One bit: at most 0.2 % above exact Adam; LoRA 1.4 % if it starts early |
| 21 | By the clock, on slow links? | At 10 Mbit/s `Local()` is first, in 5,000 steps too; at 100 seeds differ |
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(STUDIES)}")
    help = "of networks: holds cifar-10-batches-py, wmt14 or LibriSpeech, see studies/own_data.py"
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help=help)
    parser.add_argument("--steps", type=int, metavar="N", help="of networks: steps of each run")
    args = parser.parse_args()
    names = args.names
    if unknown := set(names) - set(STUDIES):
        parser.error(f"there is no study {sorted(unknown)}: expected any of {', '.join(STUDIES)}")
    if args.data_dir is not None or args.steps is not None:
        if names != ["networks"] or (args.steps or 10) < 10:
            parser.error("--data-dir and --steps are for `python -m studies networks`; expected 10 steps at least")
        try:
            own_data.given(args.data_dir, args.steps)
        except MissingError as error:
            parser.error(f"--data-dir: {error}")
    logging.disable(logging.WARNING)  # runs that diverge say so at length
    console, sections = Console(stderr=True), []
    for name in names or STUDIES:
        start = time.monotonic()
        with console.status(f"Study {name} ..."):
            sections.append(STUDIES[name]())
        console.print(f"Study {name}: {time.monotonic() - start:.0f} s")
    if names:
        print("\n".join(sections))
        return
    machine = report.machine()
    report.DOCS.mkdir(exist_ok=True)
    (report.DOCS / "studies.md").write_text(HEAD.format(machine=machine) + "\n" + "\n".join(sections))
    console.print(f"Wrote {report.DOCS / 'studies.md'}")


if __name__ == "__main__":
    main()
