"""How many instructions the compiled CUDA kernels execute, which bounds their speed: python -m tests.cuda.instructions.

By ``machine``, so no GPU is needed: PTX instructions of a warp for 128 elements (a warp's 32 threads, four each), in
blocks of 1,024, with two workers' messages, and the bytes that an element takes from and to the device's memory.
"""

import json
import os
import subprocess
import sys
import tempfile

import numpy as np

ELEMENTS, BLOCK = 65_536, 1024
f32 = np.float32
BIT = 1 / 8 + 4 / BLOCK  # and its share of a scale


def measure(folder):
    """The numbers by kernel and case; ``folder`` has the PTX."""
    from horovod_onebit import Recipe
    from horovod_onebit.kernels import cuda as kernels
    from horovod_onebit.kernels.reference import CHUNK
    from horovod_onebit.rules import Context, Tensor, zero_one_adam
    from horovod_onebit.rules.adam import Adam
    from horovod_onebit.rules.lamb import LAMB
    from horovod_onebit.rules.sgd import SGD
    from horovod_onebit.schedule import Sends
    from tests.cuda import machine

    programs = machine.install(folder)
    rng = np.random.default_rng(0)

    def vector():
        room = np.zeros(ELEMENTS + 4, f32)
        first = -(room.ctypes.data // 4) % 4
        room[:] = rng.standard_normal(ELEMENTS + 4)
        return room[first : first + ELEMENTS]

    grad, tensor = vector(), Tensor("x", vector(), vector(), np.abs(vector()), vector(), 20, 20)
    adam, lamb, sgd = Adam(lr=1e-3), LAMB(lr=1e-3), SGD(lr=1e-3, momentum=0.9)
    sync = zero_one_adam.of(adam, Sends.DISPLACEMENT)
    sync.init(tensor)
    tensor.variance, tensor.anchor = vector(), vector()
    np.abs(tensor.variance, out=tensor.variance)
    update = Context(kernels, Recipe(block_size=BLOCK), 2)
    momentum = Context(kernels, Recipe(space="momentum", clip=None, block_size=BLOCK), 2)
    coding = update.coding(BLOCK)
    rows = rng.integers(0, 256, (2, coding.codec.size(ELEMENTS, BLOCK)), dtype=np.uint8)
    rows.view(f32)[:, :: coding.codec.record_size(BLOCK) // 4] = 1
    row, new, chunks = rows[0].copy(), vector(), np.empty((ELEMENTS // CHUNK, 2))
    cases = {
        "encode, update space": (20 + BIT, lambda: adam.encode(tensor, grad, row, 0, BLOCK, update)),
        "encode, momentum space": (16 + BIT, lambda: adam.encode(tensor, grad, row, 0, BLOCK, momentum)),
        "decode and Adam": (16 + 2 * BIT, lambda: adam.apply(tensor, rows, 0, coding, update)),
        "decode and SGD": (16 + 2 * BIT, lambda: sgd.apply(tensor, rows, 0, coding, update)),
        "LAMB's sums": (12, lambda: kernels.sums(*lamb.lengths(tensor, update), tensor.arrays(), chunks)),
        "LAMB's step": (16, lambda: lamb.finish(tensor, np.ones(2), update)),
        "0/1 Adam's local step": (24, lambda: sync.local_step(tensor, grad, update)),
        "0/1 Adam's exchange": (16 + BIT, lambda: sync.encode(tensor, grad, row, 0, BLOCK, update)),
    }
    found = {}
    for name, (width, run) in cases.items():
        lamb.init(tensor) if "LAMB" in name else sync.init(tensor)
        tensor.anchor = new if tensor.anchor is None else tensor.anchor
        for program in programs.values():
            program.counts.clear()
        run()
        count = sum(program.counts.total() for program in programs.values()) / (ELEMENTS / 128)
        found[name] = {"instructions": round(count), "bytes": width}
    return found


def main():
    if "NUMBA_ENABLE_CUDASIM" in os.environ:
        print(json.dumps(measure(sys.argv[1]), indent=1))
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "tests.cuda.compile", folder], check=True)
        command = [sys.executable, "-m", "tests.cuda.instructions", folder]
        subprocess.run(command, env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}, check=True)


if __name__ == "__main__":
    main()
