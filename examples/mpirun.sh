#!/bin/bash
# The same job with Open MPI alone:  examples/mpirun.sh 4 host1:2,host2:2
# The clone and its .venv are at the same place on all hosts, and ssh needs no password between them.
# Other environment variables that the workers need:  -x NAME or -x NAME=VALUE  for each, beside those below.
# Hosts with several networks:  --mca btl_tcp_if_include eth0 -x NCCL_SOCKET_IFNAME=eth0  names the one to use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
processes=${1:-2}
hosts=${2:-localhost:$processes}
export PATH="$PWD/.venv/bin:$PATH"

mpirun -np "$processes" -H "$hosts" --bind-to none --map-by slot -x PATH -x OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
    "$PWD/.venv/bin/python" torch/train.py --task digits --compression onebit --warmup-steps 20 --steps "${STEPS:-600}"
