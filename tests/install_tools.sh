#!/bin/sh
# Installs what tests/tools.txt names and this machine lacks, and the packages that are given as arguments.
#
# It does so on Debian and its relatives, as root or by a sudo that asks for no password. Anywhere else it prints one line
# with what to type. The exit code is 0 in both cases: tests that lack a tool skip, and pytest counts them.
set -eu
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin # an ordinary user's PATH lacks these

is_there() {
    for program in $(echo "$1" | tr , ' '); do
        if command -v "$program" >/dev/null; then return 0; fi
    done
    return 1
}

packages=$*
while read -r name needed programs; do
    case $name in '#'*) continue ;; esac
    is_there "$programs" || packages="$packages $(echo "$needed" | tr , ' ')"
done <"$(dirname "$0")/tools.txt"
packages=$(echo $packages)
[ -n "$packages" ] || exit 0

give_up() {
    echo "Tests are skipped that need what Debian calls $packages. $1"
    exit 0
}

command -v apt-get >/dev/null || give_up "Install it by this system's package manager to run them."
if [ "$(id -u)" = 0 ]; then
    root=''
elif sudo -n true 2>/dev/null; then
    root='sudo -n'
else
    give_up "To run them, type: sudo $0 $*"
fi

echo "Installing for the tests, by apt-get: $packages"
# Debian starts a broker and an sshd once they are installed. The tests start their own, on free ports.
no_services=${DPKG_ROOT:-}/usr/sbin/policy-rc.d
if [ ! -e "$no_services" ]; then
    trap '$root rm -f "$no_services"' EXIT
    trap 'exit 1' HUP INT TERM
    printf '#!/bin/sh\nexit 101\n' | $root tee "$no_services" >/dev/null
    $root chmod 755 "$no_services"
fi
apt_get="$root env DEBIAN_FRONTEND=noninteractive apt-get -qq"
$apt_get update || give_up "apt-get update failed. To try again, type: $0 $*"
known=''
for package in $packages; do # Ubuntu lacks one of them, and apt-get would then install nothing
    if apt-cache show "$package" >/dev/null 2>&1; then known="$known $package"; else echo "apt-get has no $package"; fi
done
$apt_get install -y --no-install-recommends $known || give_up "apt-get install failed. To try again, type: $0 $*"
for package in $known; do # else the services would start with the machine
    case $package in mosquitto) units=mosquitto ;; openssh-server) units='ssh.service ssh.socket' ;; *) units='' ;; esac
    for unit in $units; do $root systemctl disable --quiet "$unit" 2>/dev/null || true; done
done
