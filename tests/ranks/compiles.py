"""Which kernels Keras's steps compile after the first one, in a process that has none (tests/test_horovodrun.py).

compiles.py KIND EXCHANGE
"""

import sys

from numba.core import event

from horovod_onebit import Recipe
from horovod_onebit.warmup import EXACT_FIRST
from tests.ranks.keras_common import OPTIMIZERS, build, train, wrap

kind, exchange = sys.argv[1:]
model = build()
optimizer = wrap(OPTIMIZERS[kind](), EXACT_FIRST + 5, recipe=Recipe(warmup="three_bit", exchange=exchange))
for steps in (1, EXACT_FIRST + 10):
    with event.install_recorder("numba:compile") as recorder:
        train(model, optimizer, steps, start=int(optimizer.iterations))
    print("compiled:", len(recorder.buffer), optimizer.phase.value)
