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
# The wheel of Horovod is kept for the next build.
cache=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/horovod-onebit
mkdir -p "$cache"
mounts+=(--volume "$cache:/build/cache")
for folder in ${MOUNTS:-}; do mounts+=(--volume "$folder:$folder:ro"); done

buildah bud --format docker "${mounts[@]}" --build-arg BASE="$base" --file docker/Dockerfile.cpu --tag "$image" .

# As Docker does it: a name that cannot be resolved makes Gloo crash.
container=$(buildah from --add-host one:10.213.7.1 --add-host two:10.213.7.2 --add-host onebit:127.0.0.1 "$image")
finish() {
    for host in one two; do
        ip netns pids "onebit-$host-$$" 2>/dev/null | xargs --no-run-if-empty kill || true
        ip netns delete "onebit-$host-$$" 2>/dev/null || true
    done
    buildah rm "$container" >/dev/null
    rm -rf "$work"
}
trap finish EXIT
inside() { buildah run --hostname "${HOST:-onebit}" --user horovod "$container" -- "$@"; }

echo "Inside, as $(inside id -un): horovod-onebit doctor"
inside horovod-onebit doctor
options=(--task digits --compression onebit --steps 60 --warmup-steps 20)
for job in torch/train.py tf/train.py; do
    echo "horovodrun -np 2 python $job"
    inside env OMP_NUM_THREADS=1 horovodrun -np 2 --gloo python "$job" "${options[@]}"
done

echo "Two hosts, as docker-compose.yml has them: network namespaces, and the image's own ssh server"
ip netns add onebit-one-$$ && ip netns add onebit-two-$$
ip link add onebit0 netns onebit-one-$$ type veth peer name onebit0 netns onebit-two-$$
for host in one two; do
    address=10.213.7.$([ $host = one ] && echo 1 || echo 2)/24
    ip -n "onebit-$host-$$" address add "$address" dev onebit0
    ip -n "onebit-$host-$$" link set onebit0 up
    ip -n "onebit-$host-$$" link set lo up
done
export -f inside
export container
HOST=two ip netns exec onebit-two-$$ bash -c 'inside entrypoint host' >"$work/sshd.log" 2>&1 &
sleep 4
HOST=one ip netns exec onebit-one-$$ bash -c 'inside env OMP_NUM_THREADS=1 ONEBIT_CLUSTER=1 entrypoint "$@"' _ \
    horovodrun -np 2 -H one:1,two:1 -p 2222 --gloo python torch/train.py "${options[@]}"
grep --max-count=1 'Accepted publickey' "$work/sshd.log"
buildah images "$image"
