#!/usr/bin/env bash
# Build the CPU image with no Docker daemon, and train in it: as root, with Debian's buildah and mmdebstrap.
#
#   docker/build_without_docker.sh [IMAGE]
#
# The base is a fresh Debian. pip has the settings and the certificates of the caller; folders that they name (a
# --find-links of one's own) are given as MOUNTS="/a /b". DRIVER is buildah's storage driver (vfs works everywhere).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
image=${1:-horovod-onebit:cpu}
suite=${SUITE:-bookworm}
base=localhost/onebit-base:$suite
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=${DRIVER:-vfs}

for tool in buildah mmdebstrap; do
    command -v "$tool" >/dev/null || { echo "$tool is missing: apt-get install buildah mmdebstrap" >&2; exit 1; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
    echo "A base image of Debian $suite ..."
    mmdebstrap --quiet --variant=minbase --include=ca-certificates "$suite" "$work/base.tar"
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$work/base.tar" /
    buildah commit --quiet --rm "$container" "$base" >/dev/null
fi

# The caller's pip settings, from files and from the environment, but for the caches.
python3 - > "$work/pip.conf" <<'PY'
import shlex, subprocess, sys
lines = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
settings = {}
for line in lines.splitlines():
    key, value = line.split("=", 1)
    name = key.rsplit(".", 1)[1]
    if name in ("cert", "index-url", "extra-index-url", "find-links", "trusted-host", "timeout", "default-timeout"):
        settings[name.removeprefix("default-")] = shlex.split(value)[0].replace("\\n", " ")
print("[global]", *(f"{k} = {v}" for k, v in settings.items()), sep="\n")
PY
mounts=(--volume "$work/pip.conf:/etc/pip.conf:ro" --volume /etc/ssl/certs:/etc/ssl/certs:ro)
for folder in ${MOUNTS:-}; do mounts+=(--volume "$folder:$folder:ro"); done

buildah bud --format docker "${mounts[@]}" --build-arg BASE="$base" --file docker/Dockerfile.cpu --tag "$image" .

container=$(buildah from "$image")
trap 'buildah rm "$container" >/dev/null; rm -rf "$work"' EXIT
inside() { buildah run --user horovod "$container" -- "$@"; }
echo "Inside, as $(inside id -un): horovod-onebit doctor"
inside horovod-onebit doctor
for job in torch/train.py tf/train.py; do
    echo "horovodrun -np 2 python $job"
    inside env OMP_NUM_THREADS=1 horovodrun -np 2 --gloo python "$job" --task digits --compression onebit \
        --steps 60 --warmup-steps 20
done
echo "horovodrun -np 2 -H localhost:1,127.0.0.1:1, each worker through the image's own ssh server"
# shellcheck disable=SC2016 # the shell inside expands it
inside sh -c 'HOME=/home/horovod entrypoint host & sleep 3
    env OMP_NUM_THREADS=1 HOME=/home/horovod horovodrun -np 2 -H localhost:1,127.0.0.1:1 -p 2222 --gloo \
        python torch/train.py --task digits --compression onebit --steps 60 --warmup-steps 20
    status=$?; kill %1; exit $status'
buildah images "$image"
