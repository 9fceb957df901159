"""Kernels are compiled before the first compressed step."""

import os
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import numpy as np
    from numba.core import event
    from horovod_onebit import Recipe, simulation
    from horovod_onebit.ahead import compile_steps
    from horovod_onebit.coded import own_recipe
    from horovod_onebit.engine import Engine
    from horovod_onebit.rules import Tensor
    from horovod_onebit.rules.{module} import {rule}
    from horovod_onebit.schedule import Sends
    from horovod_onebit.tasks import run

    recipe, rule = {recipe}, {rule}({arguments})

    def worker(collectives):
        rng = np.random.default_rng(collectives.rank)
        size = 5000
        w, m, v, g = (rng.random(size, np.float32) for _ in range(4))
        engine = Engine(recipe, collectives)
        tensor = Tensor("w", w, m, v if {divides} else None, engine.feedback.residual("w", size), 3, 3)
        rule.init(tensor)
        run(engine.prepare([tensor], [rule]))
        plan = engine.plan(Sends.CONTRIBUTION, [rule])
        engine.send_rest({{0: g}}, plan)
        assert run(engine.receive({{0: g}}, plan))

    compiled = []
    for step in (lambda: compile_steps(recipe, [rule], {workers}, divides={divides}),
                 lambda: simulation.run(worker, {workers})):
        with event.install_recorder("numba:compile") as recorder:
            step()
        compiled.append(len(recorder.buffer))
    print(*compiled)
"""
CASES = [
    ("adam", "Adam", "lr=0.01", True, "Recipe()", 4),
    ("sgd", "SGD", "lr=0.01, momentum=0.9", False, "Recipe(exchange='direct')", 2),
    ("gradient", "Gradient", "", True, "own_recipe(Recipe(warmup='three_bit', exchange='two_stage'))", 2),
    ("gradient", "Gradient", "divides=True", True, "own_recipe(Recipe(warmup='three_bit', exchange='two_stage'))", 2),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("module", "rule", "arguments", "divides", "recipe", "workers"), CASES)
def test_nothing_is_compiled_in_the_first_step(module, rule, arguments, divides, recipe, workers, tmp_path):
    names = {"module": module, "rule": rule, "arguments": arguments, "divides": divides, "recipe": recipe}
    program = textwrap.dedent(PROGRAM).format(**names, workers=workers)
    fresh = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=fresh)
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert before > 10
    assert after == 0
