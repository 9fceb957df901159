"""``python -m studies`` runs all and writes docs/studies.md; with names, it prints those sections only."""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable

from rich.console import Console

from studies import early, local, magnitudes, moments, paraboloid, published, quadratics, rates, report, stages

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
}
HEAD = """# Studies

What the paper found (Tarasov and Ershov 2022, "1-bit Adam and 1-bit LAMB"), reproduced; and what removes its cause.
Made by `python -m studies` on {machine}. `paper` is 1-bit Adam as published, `fixed` the same with epsilon under the
root, `robust` the default of this project.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(STUDIES)}")
    names = parser.parse_args().names
    if unknown := set(names) - set(STUDIES):
        parser.error(f"there is no study {sorted(unknown)}: expected any of {', '.join(STUDIES)}")
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
    machine = f"{os.cpu_count()} cores of an {report.processor()}"
    report.DOCS.mkdir(exist_ok=True)
    (report.DOCS / "studies.md").write_text(HEAD.format(machine=machine) + "\n" + "\n".join(sections))
    console.print(f"Wrote {report.DOCS / 'studies.md'}")


if __name__ == "__main__":
    main()
