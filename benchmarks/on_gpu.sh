#!/bin/sh
# What only a machine with an NVIDIA GPU can tell: the tests for CUDA, then W3, W2 and W1 beside pfl and Flower.
#
#   benchmarks/on_gpu.sh [DIR]                        the figures of each part, by default into $OUT or runs/on-gpu
#   DEVICE=cpu benchmarks/on_gpu.sh                   a rehearsal without a GPU, whose figures say nothing
#   PIP_NO_INDEX=1 PIP_FIND_LINKS=WHEELS PIP_NO_BUILD_ISOLATION=0 benchmarks/on_gpu.sh    packages from a folder of wheels
#   OWN=PYTHON PEERS=PYTHON benchmarks/on_gpu.sh      in environments that are there already
#
# Both environments see the packages of $PYTHON, so an installed PyTorch with CUDA is kept. All parts take eight minutes
# at most; a part that fails or takes too long does not stop the others.
cd "$(dirname "$0")/.." || exit 1
device=${DEVICE:-cuda} python=${PYTHON:-python3} out=${1:-${OUT:-runs/on-gpu}} failed=0
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
export OMP_NUM_THREADS=1 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

part() { # NAME SECONDS COMMAND...
    name=$1 limit=$2 && shift 2
    echo "== $name"
    timeout --kill-after=5 "$limit" "$@" || { echo "$name FAILED: exit code $?, at its limit of $limit s if 124"; failed=1; }
}

make_environment() { # NAME PACKAGES...
    home=$work/$1 && shift
    "$python" -m venv "$home" || return
    "$python" -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")' \
        > "$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/others.pth"
    # shellcheck disable=SC2086  # an argument may be several words
    for package in "$@"; do part "install $package" 40 "$home/bin/python" -m pip install --quiet $package; done
}

[ -n "$OWN" ] || make_environment own "--no-deps -e ." "-e .[benchmarks] pytest pytest-timeout pytest-xdist hypothesis"
[ -n "$PEERS" ] || make_environment peers "flwr[simulation]==1.42.0" "pfl[pytorch]==0.6.0" # the extra `peers`
own=${OWN:-$work/own/bin/python} peers=${PEERS:-$work/peers/bin/python}

if [ "$device" = cuda ]; then runtime=vmap short='' several='-n 4'; else runtime=native short='--shrink 100 --turns 1' several=''; fi
for_devices=$(grep -lrE 'TORCH_DEVICES|SUM_DEVICES|torch\.cuda' tests --include='test_*.py' --include=conftest.py | sed 's|/conftest.py$||')
# shellcheck disable=SC2086
part tests 70 "$own" -m pytest -p no:cacheprovider -k "$device" $several --timeout 60 --junit-xml="$out/tests.xml" $for_devices
for each in W3:65 W2:60 W1:120; do
    # shellcheck disable=SC2086
    part "${each%:*}" "${each#*:}" "$own" -m benchmarks.simulation --workloads "${each%:*}" --device "$device" --runtimes "$runtime" \
        --turns 3 $short --peers-python "$peers" --json "$out/${each%:*}.json"
done
exit $failed
