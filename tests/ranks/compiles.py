"""Which kernels Keras's steps compile after the first one, in a process that has none (tests/test_horovodrun.py)."""

from numba.core import event

from horovod_onebit import Recipe
from horovod_onebit.coded import FIRST
from tests.ranks.keras_common import OPTIMIZERS, build, train, wrap

model = build()
optimizer = wrap(OPTIMIZERS["adamw"](), FIRST + 5, recipe=Recipe(warmup="three_bit"))
for steps in (1, FIRST + 10):
    with event.install_recorder("numba:compile") as recorder:
        train(model, optimizer, steps, start=int(optimizer.iterations))
    print("compiled:", len(recorder.buffer), optimizer.phase.value)
