"""How many instructions the compiled CUDA kernels execute, which bounds their speed: python -m tests.cuda.instructions.

By ``machine``, so no GPU is needed: PTX instructions of a warp for 128 elements (a warp's 32 threads, four each), in
blocks of 1,024, with two workers' messages. An H200 starts at most 4 x 132 of them a cycle and reads or writes about
2.4 KB a cycle, so that a kernel of 20 bytes an element wants clearly fewer than 560. (A division or a root is one
instruction in PTX, and about ten on the GPU.)
"""

import json
import os
import subprocess
import sys
import tempfile

import numpy as np

ELEMENTS, BLOCK = 65_536, 1024
f32 = np.float32


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
        "encode, update space": ("encode", lambda: kernels.encode(g, m, v, None, e, *one, spec)),
        "encode, momentum space": ("encode", lambda: kernels.encode(g, m, None, None, e, *one, spec)),
        "decode and Adam": ("apply", lambda: kernels.apply(scales, bits, m, v, w, spec, update_space=True, **options)),
        "decode and SGD": (
            "apply",
            lambda: kernels.apply(scales, bits, m, None, w, spec, update_space=True, **options),
        ),
        "a server's second stage": ("recode", lambda: kernels.recode(scales, bits, e, g, *one, "guarded", BLOCK)),
        "LAMB's sums": ("squares", lambda: kernels.squares(m, v, w, np.empty((ELEMENTS // CHUNK, 2)), spec)),
        "LAMB's step": ("move", lambda: kernels.move(m, v, w, spec, **options)),
        "0/1 Adam's local step": ("local_step", lambda: kernels.local_step(g, m, v, w, spec, **options)),
        "0/1 Adam's exchange": (
            "encode_moved",
            lambda: kernels.encode_moved(w, anchor, None, e, *one, spec, decay=1.0),
        ),
    }
    found = {}
    for name, (program, run) in cases.items():
        run()
        found[name] = round(programs[program].counts.total() / (ELEMENTS / 128))
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
