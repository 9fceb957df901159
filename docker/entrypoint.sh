#!/bin/sh
# `entrypoint host` makes the container a host of a cluster: an ssh server on port 2222, without root.
# `entrypoint COMMAND ...` runs a command, which with ONEBIT_CLUSTER=1 may start jobs on the hosts.
# The cluster's key is in ~/.ssh, a volume that all of these share.
# `entrypoint healthy` fails where a host's ssh server does not answer. A command is healthy while it runs.
set -eu

keys=$HOME/.ssh
host_key=${TMPDIR:-/tmp}/ssh_host_key

# Puts a complete file into the volume, unless one of that name is there: a link appears as a whole, and only once.
publish() {
    [ -e "$keys/$1" ] || ln "$own/$1" "$keys/$1" 2>/dev/null || [ -e "$keys/$1" ] || {
        echo "entrypoint: no hard link can be made in $keys, and the hosts need one" >&2
        exit 1
    }
}

share_key() (
    # An operator has mounted keys of its own.
    [ -w "$keys" ] || [ ! -e "$keys/authorized_keys" ] || exit 0
    mkdir -p "$keys" && chmod 700 "$keys"
    # Whichever container comes first makes the key. None waits for another, which may have died on its way.
    umask 077
    own=$(mktemp -d "$keys/.making.XXXXXX")
    if [ ! -e "$keys/id_ed25519" ]; then
        ssh-keygen -q -t ed25519 -N '' -C horovod-onebit -f "$own/id_ed25519"
        publish id_ed25519
    fi
    ssh-keygen -y -f "$keys/id_ed25519" > "$own/authorized_keys"
    printf 'Host *\n  Port 2222\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n' \
        > "$own/config"
    publish authorized_keys
    publish config
    rm -rf "$own"
)

case ${1:-} in
host)
    share_key
    rm -f "$host_key" "$host_key.pub"
    ssh-keygen -q -t ed25519 -N '' -f "$host_key"
    # A login has the environment of the container: horovodrun looks for python there.
    exec /usr/sbin/sshd -D -e -p 2222 -h "$host_key" \
        -o "AuthorizedKeysFile=$keys/authorized_keys" -o PasswordAuthentication=no -o UsePAM=no \
        -o StrictModes=no -o PidFile=/tmp/sshd.pid -o "SetEnv=PATH=$PATH"
    ;;
healthy)
    [ ! -e "$host_key" ] || ssh-keyscan -T 5 -t ed25519 -p 2222 127.0.0.1 2>/dev/null | grep -q ssh-ed25519
    exit
    ;;
esac
[ -z "${ONEBIT_CLUSTER:-}" ] || share_key
exec "$@"
