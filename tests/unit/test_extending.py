"""docs/extending.md: its four files, as they are printed, found and run like the library's own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()

BEGIN = """
import sys
from pathlib import Path
import numpy as np
import horovod_onebit.codecs, horovod_onebit.exchange, horovod_onebit.rules
for package in (horovod_onebit.codecs, horovod_onebit.exchange, horovod_onebit.rules):
    package.__path__.append(str(Path(sys.argv[1], package.__name__.rpartition(".")[2])))
from horovod_onebit import Recipe, simulation
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules.adam import Adam

def trained(rule, workers=4, steps=60, kernels="reference", run={"warmup_steps": 10}, **options):
    recipe = Recipe(min_compressed_size=1, block_size=64, bucket_size=700, **options)

    def worker(collectives):
        weights = {name: np.zeros(size, np.float32) for name, size in (("a", 1000), ("b", 313))}
        optimizer = NumpyOptimizer(
            weights, rule, collectives=collectives, recipe=recipe, kernels=kernels, **run
        )
        rng = np.random.default_rng(collectives.rank)
        for _ in range(steps):
            optimizer.step({k: (w - 1 + 0.3 * rng.standard_normal(w.size)).astype("f") for k, w in weights.items()})
        return np.concatenate(list(weights.values()))

    found = simulation.run(worker, workers)
    assert all((one == found[0]).all() for one in found)
    return found[0]

near = lambda found: np.abs(found - 1).mean() < 0.2
"""
PROGRAMS = {
    "rules": """
from horovod_onebit.rules.rmsprop import RMSprop
for kernels in ("reference", "cpu"):
    assert near(trained(RMSprop(lr=0.005, momentum=0.9), kernels=kernels, exchange="two_stage"))
assert near(trained(RMSprop(lr=0.005, momentum=0.9), run={}, steps=300))
""",
    "torch": """
import torch
from horovod_onebit.kernels import cpu
from horovod_onebit.rules import Context, Tensor
from horovod_onebit.rules.rmsprop import RMSprop
from horovod_onebit.torch.rules import adapter_for
p = torch.nn.Parameter(torch.ones(50))
optimizer = torch.optim.RMSprop([p], lr=0.01, momentum=0.5, weight_decay=0.1)
adapter = adapter_for(optimizer)
rule = adapter.rule(optimizer.param_groups[0], 1.0)
assert rule == RMSprop(lr=0.01, momentum=0.5, weight_decay=0.1), rule
adapter.init_state(optimizer.param_groups[0], p, optimizer.state[p])
tensor, context = Tensor("w", *(np.full(50, x, "f") for x in (1, 0, 0, 0))), Context(cpu, Recipe(), 1)
for k in range(20):
    p.grad = torch.from_numpy(np.random.default_rng(k).standard_normal(50).astype("f"))
    optimizer.step()
    rule.exact_step(tensor, p.grad.numpy(), context)
np.testing.assert_allclose(tensor.weight, p.detach().numpy(), rtol=1e-5, atol=1e-6)
""",
    "codecs": """
assert near(trained(Adam(lr=0.05), codec="ternary", kernels="cpu"))
assert near(trained(Adam(lr=0.05), server_codec="ternary", exchange="two_stage"))
""",
    "exchange": """
assert (trained(Adam(lr=0.05), exchange="scattered") == trained(Adam(lr=0.05), exchange="direct")).all()
""",
    "schedule": """
sys.path.append(sys.argv[1])
from renewed import Renewed
ordinary = trained(Adam(lr=0.05))
never = trained(Adam(lr=0.05), run={"schedule": Renewed(exact_steps=10, every=1000)})
assert (never == ordinary).all()
renewed = trained(Adam(lr=0.05), run={"schedule": Renewed(exact_steps=10, every=5)})
assert near(renewed) and (renewed != ordinary).any()
always = trained(Adam(lr=0.05), run={"schedule": Renewed(exact_steps=10, every=1)})
assert np.allclose(always, trained(Adam(lr=0.05), warmup="exact", run={"warmup_steps": 1000}), atol=1e-5)
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page's files, where it says that they are."""
    folder = tmp_path_factory.mktemp("extending")
    found = re.findall(r"(?:own, |horovod_onebit/)`?([\w/]+\.py)`.*?```python\n(.*?)```", PAGE, re.DOTALL)
    assert [name for name, _ in found] == [
        "rules/rmsprop.py",
        "codecs/ternary.py",
        "exchange/scattered.py",
        "renewed.py",
    ]
    for name, content in found:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize("what", PROGRAMS)
def test_the_files_of_the_page_run(what, folder):
    if what == "torch":
        pytest.importorskip("torch.nn")
    # In a process of its own: what is found in the folders is remembered.
    command = [sys.executable, "-c", BEGIN + PROGRAMS[what], str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
