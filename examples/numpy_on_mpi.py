"""NumPy on MPI, with neither Horovod nor a framework (pip install '.[mpi]'):

mpirun -np 2 python -m mpi4py examples/numpy_on_mpi.py
"""

import numpy as np

from horovod_onebit.mpi import MPICollectives
from horovod_onebit.optimizer import NumpyOptimizer
from horovod_onebit.rules.adam import Adam


def main():
    workers = MPICollectives()
    random = np.random.default_rng(0)  # the same on all workers, as files would be
    x = random.standard_normal((4096, 64)).astype(np.float32)
    y = x @ random.standard_normal((64, 32)).astype(np.float32)
    x, y = x[workers.rank :: workers.size], y[workers.rank :: workers.size]  # this worker's share

    weights = {"kernel": np.zeros((64, 32), np.float32), "bias": np.zeros(32, np.float32)}
    optimizer = NumpyOptimizer(weights, Adam(lr=3e-2), collectives=workers, warmup_steps=20)
    batches = np.random.default_rng([1, workers.rank])
    for step in range(200):
        chosen = batches.integers(0, len(x), 64)
        error = x[chosen] @ weights["kernel"] + weights["bias"] - y[chosen]
        optimizer.step({"kernel": x[chosen].T @ error / 64, "bias": error.mean(0)})  # moves the weights in place
        if workers.rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}: mean square {np.square(error).mean():.4f}", flush=True)


if __name__ == "__main__":
    main()
