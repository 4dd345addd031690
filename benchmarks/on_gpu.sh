#!/bin/sh
# What only a machine with an NVIDIA GPU can tell: W3 beside pfl, Flower and the plain loop, its stages, the first rounds
# of a cell with ResNet-18, then W2, W1 and the tests for CUDA. The first rows stand after about a minute.
#
#   benchmarks/on_gpu.sh [DIR]                        the figures of each part, by default into $OUT or runs/on-gpu
#   DEVICE=cpu benchmarks/on_gpu.sh                   a rehearsal: as without a GPU, sizes are tiny, figures mean nothing
#   PIP_NO_INDEX=1 PIP_FIND_LINKS=WHEELS PIP_NO_BUILD_ISOLATION=0 benchmarks/on_gpu.sh    packages from a folder of wheels
#   OWN=PYTHON PEERS=PYTHON benchmarks/on_gpu.sh      in environments that are there already
#   DATA=DIR benchmarks/on_gpu.sh                     where cifar10/ is, by default shared/data
#
# Both environments see the packages of $PYTHON, so an installed PyTorch with CUDA is kept. All parts take eight minutes
# at most; a part that fails or takes too long does not stop the others. A rehearsal leaves the graphs of ResNet-18 in
# runs/cache: carried to the machine, they serve where its PyTorch cannot export them.
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3} out=${1:-${OUT:-runs/on-gpu}} data=${DATA:-shared/data} failed=0
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
export OMP_NUM_THREADS=1 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 XDG_CACHE_HOME="${XDG_CACHE_HOME:-$PWD/runs/cache}"

part() { # NAME SECONDS COMMAND...
    name=$1 limit=$2 && shift 2
    echo "== $name"
    timeout --kill-after=10 "$limit" "$@" || { echo "$name FAILED: exit code $?, at its limit of $limit s if 124"; failed=1; }
}

make_environment() { # NAME PACKAGES...
    home=$work/$1 && shift
    "$python" -m venv "$home" || return
    "$python" -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")' \
        > "$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/others.pth"
    # shellcheck disable=SC2086  # an argument may be several words
    for package in "$@"; do part "install $package" 40 "$home/bin/python" -m pip install --quiet $package; done
}

[ -n "$PEERS" ] || make_environment peers "flwr[simulation]==1.42.0" "pfl[pytorch]==0.6.0" & # the extra `peers`
[ -n "$OWN" ] || make_environment own "--no-deps -e ." "-e .[benchmarks] pytest pytest-timeout pytest-xdist hypothesis"
wait
own=${OWN:-$work/own/bin/python} peers=${PEERS:-$work/peers/bin/python}

device=${DEVICE:-$("$own" -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')}
[ "$device" = cuda ] || echo "no GPU: sizes are tiny, figures mean nothing"
if [ "$device" = cuda ]; then short='--turns 3' stages='' several='-n 4'; else short='--shrink 100 --turns 1' stages='--clients 4 --samples 4 --rounds 1' several=''; fi

beside_peers() { # WORKLOAD SECONDS
    # shellcheck disable=SC2086
    part "$1" "$2" "$own" -m benchmarks.simulation --workloads "$1" --device "$device" --runtimes vmap $short \
        --peers-python "$peers" --json "$out/$1.json"
}

beside_peers W3 75
# shellcheck disable=SC2086
part stages 40 "$own" -m benchmarks.gpu_stages $stages --json "$out/stages.json"
cell="fedglp-adp --table 6 --column resnet18 --method fedglp-adp --seeds 1 --max-cells 1 --jobs 1 --data-dir $data"
if [ "$device" = cuda ]; then
    # shellcheck disable=SC2086
    part ResNet-18 90 "$own" -c 'import sys; from hushfleet.aggregator.commands.main import main; sys.exit(main())' reproduce $cell --out "$out/resnet" --runs "$work/runs"
else
    part ResNet-18 300 "$own" -c 'from hushfleet.models import get_model
from hushfleet.models.export import export_graphs
print(len(export_graphs(get_model("resnet18-gn", classes=10)).gradient), "bytes of graph")'
fi
beside_peers W2 55
beside_peers W1 90
for_devices=$(grep -lrE 'TORCH_DEVICES|SUM_DEVICES|torch\.cuda' tests --include='test_*.py' --include=conftest.py | sed 's|/conftest.py$||')
# shellcheck disable=SC2086
part tests 60 "$own" -m pytest -p no:cacheprovider -k "$device" $several --timeout 60 --junit-xml="$out/tests.xml" $for_devices
exit $failed
