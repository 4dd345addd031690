#!/bin/sh
# Runs at a card's first start: sees to it that install.sh runs now, or after the next start, until it has ended well.
#   first-boot.sh [--later]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
if [ -e "$here/done" ]; then exit 0; fi
units=${HUSHFLEET_ROOT:-}/etc/systemd/system
mkdir -p "$units/multi-user.target.wants"
sed "s|@HERE@|$here|g" "$here/hushfleet-install.service" > "$units/hushfleet-install.service"
ln -sf ../hushfleet-install.service "$units/multi-user.target.wants/hushfleet-install.service"
sync
if [ "${1:-}" != --later ] && [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    systemctl start --no-block hushfleet-install.service
fi
