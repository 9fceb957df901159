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
    from horovod_onebit.kernels import cuda as kernels
    from horovod_onebit.kernels.reference import CHUNK, Spec
    from tests.cuda import machine

    programs = machine.install(folder)
    rng = np.random.default_rng(0)

    def vector():
        room = np.zeros(ELEMENTS + 4, f32)
        first = -(room.ctypes.data // 4) % 4
        room[:] = rng.standard_normal(ELEMENTS + 4)
        return room[first : first + ELEMENTS]

    g, m, e, w, anchor = (vector() for _ in range(5))
    v = vector()
    np.abs(v, out=v)
    spec = Spec(0.9, 0.1, 0.0, 1e-8, False, 1.0, clip=3.0, scale="guarded", block_size=BLOCK)
    scales, bits = np.ones((2, ELEMENTS // BLOCK), f32), rng.integers(0, 256, (2, ELEMENTS // 8), dtype=np.uint8)
    one, options = (scales[0].copy(), bits[0].copy()), {"step_size": 1e-3, "decay": 1.0}
    cases = {
        "encode, update space": (20 + BIT, "encode", lambda: kernels.encode(g, m, v, None, e, *one, spec)),
        "encode, momentum space": (16 + BIT, "encode", lambda: kernels.encode(g, m, None, None, e, *one, spec)),
        "decode and Adam": (
            16 + 2 * BIT,
            "apply",
            lambda: kernels.apply(scales, bits, m, v, w, spec, update_space=True, **options),
        ),
        "decode and SGD": (
            16 + 2 * BIT,
            "apply",
            lambda: kernels.apply(scales, bits, m, None, w, spec, update_space=True, **options),
        ),
        "a server's second stage": (
            8 + 3 * BIT,
            "recode",
            lambda: kernels.recode(scales, bits, e, g, *one, "guarded", BLOCK),
        ),
        "LAMB's sums": (12, "squares", lambda: kernels.squares(m, v, w, np.empty((ELEMENTS // CHUNK, 2)), spec)),
        "LAMB's step": (16, "move", lambda: kernels.move(m, v, w, spec, **options)),
        "0/1 Adam's local step": (24, "local_step", lambda: kernels.local_step(g, m, v, w, spec, **options)),
        "0/1 Adam's exchange": (
            16 + BIT,
            "encode_moved",
            lambda: kernels.encode_moved(w, anchor, None, e, *one, spec, decay=1.0),
        ),
    }
    found = {}
    for name, (width, program, run) in cases.items():
        run()
        count = programs[program].counts.total() / (ELEMENTS / 128)
        found[name] = {"instructions": round(count), "bytes": width}
        programs[program].counts.clear()
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
