#!/bin/sh
# Installs Hushfleet from the folder that this file lies in: a card's boot partition, or where `hushfleet push` put it.
# Needs root, Python and systemd's folders; no network, no pip. It may be cut off anywhere and started again; when all
# is done it leaves a file `done` beside it. What it says is also in install.log beside it.
#   HUSHFLEET_ROOT=/mnt/root  install into the tree below it, and start nothing
set -eu
umask 022
here=$(cd "$(dirname "$0")" && pwd)
root=${HUSHFLEET_ROOT:-}
opt=$root/opt/hushfleet etc=$root/etc/hushfleet state=$root/var/lib/hushfleet units=$root/etc/systemd/system

say() { echo "hushfleet: $*"; echo "$*" >> "$here/install.log" || :; }
fail() { say "error: $2"; exit "$1"; }
# A file is there whole or not at all:  put FROM TO MODE GROUP
put() { cp "$1" "$2.part"; chmod "$3" "$2.part"; chown "root:$4" "$2.part"; sync "$2.part"; mv -f "$2.part" "$2"; }
# Overwrites before it deletes, for what was secret. Flash memory may keep an old copy that nobody can reach by files.
erase() {
    [ -f "$1" ] || return 0
    dd if=/dev/zero of="$1" bs="$(wc -c < "$1")" count=1 conv=notrunc 2> /dev/null || :
    sync "$1"
    rm -f "$1"
}

[ "$(id -u)" = 0 ] || fail 1 "install.sh needs root: sudo sh $here/install.sh"
if [ -e "$here/done" ]; then say "nothing to do: $here/done is there"; exit 0; fi

# A ledger that is forgotten at each start would let the board spend its budget again and again. A container's overlay
# lasts as long as the container.
place=$state
while [ ! -e "$place" ]; do place=$(dirname "$place"); done
kind=$(stat -f -c %T "$place")
if grep -Eq '^allow_volatile_state *= *true' "$here/device.toml"; then kind=; fi
if [ -e "$root/.dockerenv" ] || [ -e "$root/run/.containerenv" ]; then kind=${kind#overlayfs}; fi
case $kind in
tmpfs | ramfs | overlayfs)
    fail 2 "$state would lie on $place, whose file system ($kind) forgets at each start what was written. Turn the overlay \
off (raspi-config, Performance Options, Overlay File System), or mount a partition of its own at $state"
    ;;
esac

# 1. The Python that the release was made for
want=$(cat "$here/python")
for python in "python$want" python3; do
    found=$(command -v "$python") || continue
    [ "$("$found" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = "$want" ] && break
    found=
done
[ -n "${found:-}" ] || fail 2 "this card is for Python $want, which is not here ($(python3 --version 2>&1 || :)): write it \
with --python for the system that it starts, 3.10 to 3.13, or take a system that has one of these"

# 2. The user that the client runs as
id hushfleet > /dev/null 2>&1 ||
    useradd --system --user-group --home-dir /var/lib/hushfleet --shell /usr/sbin/nologin hushfleet

# 3. The release, complete before anything points to it
say "unpacking the release; this takes some minutes"
mkdir -p "$opt" "$etc" "$units"
install -d -m 700 -o hushfleet -g hushfleet "$state"
ln -sfn "$found" "$opt/python"
put "$here/slots.pyz" "$opt/slots.pyz" 755 root
for name in root_key release_keys; do put "$here/$name" "$opt/$name" 644 root; done
"$found" -I "$opt/slots.pyz" first "$here/release.hfr" --root "$opt" --state "$state" >> "$here/install.log" 2>&1 || {
    code=$? # 2, as above: it is for another system, and trying it each minute would wear the card out
    say "error: the release cannot be installed: $(tail -n 1 "$here/install.log")"
    exit $code
}
version=$(basename "$(readlink "$opt/current")")
mkdir -p "$root/usr/local/bin"
put "$here/hushfleet-edge.sh" "$root/usr/local/bin/hushfleet-edge" 755 root

# 4. Configuration, and folders for what the client keeps and sees
chgrp hushfleet "$etc" && chmod 750 "$etc"
put "$here/device.toml" "$etc/device.toml" 640 hushfleet
put "$here/ca.pem" "$etc/ca.pem" 640 hushfleet
images=$root$(cat "$here/images_path")
# nothing where the data are one file, which its owner puts there
if [ "$images" != "$root" ]; then
    install -d -m 2775 -o hushfleet -g hushfleet "$images"
    while read -r class; do
        if [ -n "$class" ]; then install -d -m 2775 -o hushfleet -g hushfleet "$images/$class"; fi
    done < "$here/classes"
fi
inbox=$root$(cat "$here/inbox_path")
if [ "$inbox" != "$root" ]; then install -d -m 2775 -o hushfleet -g hushfleet "$inbox"; fi
if [ -d "$here/images" ]; then
    cp -R "$here/images/." "$images/"
    chown -R hushfleet:hushfleet "$images"
fi

# 5. The token goes where only the client reads it, then everything secret leaves the card's open partition. A token
#    that a power cut has left half erased is none.
if grep -Eqx '[A-Za-z0-9_-]{32,128}' "$here/enrol.token" 2> /dev/null; then
    # As the client's own user: where it writes there may be links.
    setpriv --reuid=hushfleet --regid=hushfleet --clear-groups sh -ec 'umask 077; rm -f "$1.part"
        cat > "$1.part"; sync "$1.part"; mv -f "$1.part" "$1"' sh "$state/enrol.token" < "$here/enrol.token"
    sync
fi
erase "$here/enrol.token"
while read -r name; do
    if [ -n "$name" ]; then erase "$here/../$name"; fi
done < "$here/secrets"
if [ -d "$here/after" ]; then cp -R "$here/after/." "$here/../"; fi

# 6. Units
for unit in "$here"/units/*; do put "$unit" "$units/$(basename "$unit")" 644 root; done
# A Jetson's GPU, or another of NVIDIA's
if [ -e "$root/dev/nvhost-gpu" ] || [ -e "$root/dev/nvgpu" ] || [ -e "$root/dev/nvidiactl" ]; then
    mkdir -p "$units/hushfleet-client.service.d"
    put "$here/gpu.conf" "$units/hushfleet-client.service.d/gpu.conf" 644 root
fi
# Where its owner lets the client delete old images
if [ -e "$here/data.conf" ]; then
    mkdir -p "$units/hushfleet-client.service.d"
    put "$here/data.conf" "$units/hushfleet-client.service.d/data.conf" 644 root
fi
mkdir -p "$root/etc/systemd/journald.conf.d" "$units/multi-user.target.wants" "$units/timers.target.wants"
put "$here/journald.conf" "$root/etc/systemd/journald.conf.d/hushfleet.conf" 644 root
for unit in hushfleet-client.service hushfleet-update.path; do
    ln -sf "../$unit" "$units/multi-user.target.wants/$unit"
done
ln -sf ../hushfleet-check.timer "$units/timers.target.wants/hushfleet-check.timer"
score=$(systemd-analyze security --offline=yes "$units/hushfleet-client.service" 2> /dev/null | tail -n 1 || :)
say "${score:-systemd-analyze is not here: the unit was not scored}"

sync
if [ -z "$root" ] && [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    systemctl try-restart systemd-journald.service || :
    systemctl restart --no-block hushfleet-client.service hushfleet-update.path hushfleet-check.timer
    say "release $version is installed; the client starts: journalctl -u hushfleet-client -f"
else
    say "release $version is installed; systemd does not run here, so the client starts with the system"
fi
# Last: without its file a reload gives the unit that runs this the usual 90 seconds, and slow boards need more.
rm -f "$units/hushfleet-install.service" "$units/multi-user.target.wants/hushfleet-install.service"
sync
echo "$version" > "$here/done"
sync
