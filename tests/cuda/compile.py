"""What the CUDA kernels compile to, in PTX, for ``machine`` to run: python -m tests.cuda.compile FOLDER."""

import sys
from pathlib import Path
from types import SimpleNamespace

from numba import cuda, types
from numba.cuda import dispatcher

from horovod_onebit.kernels.cuda.programs import PROGRAMS


def ptx(program, capability):
    """One kernel for GPUs of a compute capability, such as (9, 0); no GPU is needed."""
    # Numba asks the driver which GPU a device function is for.
    known = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    try:
        return cuda.compile_ptx(PROGRAMS[program], (types.int64, types.int64), cc=capability)[0]
    finally:
        dispatcher.get_current_device = known


def write(folder, capability=(9, 0)):
    """All kernels, a file each."""
    for program in PROGRAMS:
        Path(folder, f"{program}.ptx").write_text(ptx(program, capability))


if __name__ == "__main__":
    write(sys.argv[1])
