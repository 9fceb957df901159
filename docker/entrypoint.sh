#!/bin/sh
# `entrypoint host` makes the container a host of a cluster: an ssh server on port 2222, without root.
# `entrypoint COMMAND ...` runs a command. Both know the cluster's key: ~/.ssh, a volume that its hosts share.
set -eu

keys=$HOME/.ssh
host_key=/tmp/ssh_host_key

share_key() {
    # An operator has mounted keys of its own.
    [ -w "$keys" ] || [ ! -e "$keys/authorized_keys" ] || return 0
    mkdir -p "$keys" && chmod 700 "$keys"
    # mkdir is atomic: the first container makes the key, the others wait for it.
    if mkdir "$keys/making" 2>/dev/null; then
        [ -e "$keys/id_ed25519" ] || ssh-keygen -q -t ed25519 -N '' -C horovod-onebit -f "$keys/id_ed25519"
        cp "$keys/id_ed25519.pub" "$keys/authorized_keys"
        printf 'Host *\n  Port 2222\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n' \
            > "$keys/config"
        chmod 600 "$keys/authorized_keys" "$keys/config"
        touch "$keys/made"
    fi
    tries=0
    while [ ! -e "$keys/made" ]; do
        tries=$((tries + 1))
        [ "$tries" -lt 60 ] || { echo "entrypoint: nobody made the cluster's key in $keys" >&2; exit 1; }
        sleep 1
    done
}

if [ "${1:-}" = host ]; then
    share_key
    rm -f "$host_key" "$host_key.pub"
    ssh-keygen -q -t ed25519 -N '' -f "$host_key"
    # A login has the environment of the container: horovodrun looks for python there.
    exec /usr/sbin/sshd -D -e -p 2222 -h "$host_key" \
        -o "AuthorizedKeysFile=$keys/authorized_keys" -o PasswordAuthentication=no -o UsePAM=no \
        -o StrictModes=no -o PidFile=/tmp/sshd.pid -o "SetEnv=PATH=$PATH"
fi
[ -z "${ONEBIT_CLUSTER:-}" ] || share_key
exec "$@"
