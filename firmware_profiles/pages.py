"""`python3 -m hushfleet.firmware_profiles.pages docs/boards`: one page a board, from the profiles.

What is measured and what is estimated is said of each figure; a page is written anew when a profile changes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hushfleet.firmware_profiles.board import Board, Quantity, load_board

PAGES = {
    "raspberry-pi-zero-2-w": ("Raspberry Pi Zero 2 W", ("raspberry-pi-zero-2-w",)),
    "raspberry-pi-4": ("Raspberry Pi 4", ("raspberry-pi-4-2gb", "raspberry-pi-4-4gb", "raspberry-pi-4-8gb")),
    "raspberry-pi-5": ("Raspberry Pi 5", ("raspberry-pi-5-4gb", "raspberry-pi-5-8gb", "raspberry-pi-5-16gb")),
    "jetson-nano": ("Jetson Nano (2019)", ("jetson-nano-2019",)),
    "jetson-orin": ("Jetson Orin", ("jetson-orin-nano", "jetson-orin-nx", "jetson-agx-orin")),
}
# Of a client that trains fashion-mnist-cnn by DP-FedAvg, measured on x86 (docs/performance.md, "Board"): its peak, and
# the processor time of a round.
CLIENT_MIB, ROUND_S = 150, 0.39
_WITH_CARD = """\
```console
hushfleet fleet add greenhouse --count 40 --board {board} --wifi home.toml
hushfleet flash --fleet greenhouse --count 40 --image raspios.img.xz --out cards
```

Write each image to its card (rpi-imager, "use custom", without its own customisation; or `dd`), put the cards in, give
them power. With the stock system on a card already: `hushfleet flash --fleet greenhouse --device greenhouse-07 --boot
/media/me/bootfs`. The image of Bookworm works the same way; its Python, 3.11, is found by itself.
"""
_WITH_PUSH = """\
No card is written: NVIDIA's system may not be redistributed, and it has its own first start. Install it, then push the
client over ssh:

```console
hushfleet fleet add greenhouse --count 1 --board {board}
hushfleet push me@jetson.local --fleet greenhouse --device greenhouse-01
```
"""
_GPU = """\
## The GPU

**Not tried on a real one.** Training is on the processor unless an ONNX Runtime with CUDA is installed on the system,
for the system's own Python (3.10 on JetPack 6) and NumPy 2. NVIDIA's index has one:

```text
sudo python3 -m pip install --no-deps --index-url https://pypi.jetson-ai-lab.io/jp6/cu126 onnxruntime-gpu
sudo systemctl restart hushfleet-client
```

The client takes it in place of the release's own, and says so in its log. With each new task it holds gradients on
random batches to the processor's (within 1e-3), measures both, and keeps what is faster;
`hushfleet-edge status DEVICE.toml` says what that is. CUDA must find some 800 MiB (estimated) and twice what the graph
needs, of the memory for training.
Whatever fails, at the start or in the middle of a round, is computed on the processor, and the round goes on.
`device.accelerator` in DEVICE.toml decides otherwise: `"cpu"`: never; `"cuda"`: also where it is slower. `install.sh`
opens the GPU's device files to the client where they are there (`hushfleet-client.service.d/gpu.conf`).
"""
_CONTAINER = """\
JetPack 4 has Python 3.6 and glibc 2.27, where no current wheel loads. Run a Debian 12 system in a container, with ssh,
and push into it. The GPU is not used.
"""


def page(title: str, boards: tuple[Board, ...]) -> str:
    """Markdown."""
    first = boards[0]
    card = first.first_boot.startswith("cloud-init")
    lines = [
        f"# {title}",
        "",
        "**Emulated, not measured.** Nobody has timed Hushfleet on this board yet. Speed is estimated from the "
        "processor's data sheet; what an emulated aarch64 system showed is said below.",
        "",
        "## What to buy",
        "",
        "| profile (`--board`) | memory | network | storage | power, idle and busy |",
        "|---|---|---|---|---|",
        *(
            f"| `{board.name}` | {_number(board.memory_mib)} MiB | {board.network} | {board.storage} | "
            f"{_number(board.power_idle_w)} W, {_number(board.power_active_w)} W |"
            for board in boards
        ),
        "",
        f"{first.cpu}, {_number(first.cores)} cores at {_number(first.clock_mhz)} MHz. With a card: 8 GB or more. Take "
        "the power supply that the maker names.",
        "",
        "## Which system",
        "",
        f"{first.os}: Python {first.python}, glibc {first.glibc}. First configuration: {first.first_boot}.",
        "",
        "## Which command",
        "",
    ]
    if card:
        lines.append(_WITH_CARD.format(board=first.name))
    else:
        lines += [*([_CONTAINER] if "container" in first.os else []), _WITH_PUSH.format(board=first.name)]
    if not card and "container" not in first.os:
        lines.append(_GPU)
    lines += ["## What to expect", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in _expected(first)]
    notes = [f"- {note}" for note in dict.fromkeys(note for board in boards for note in board.notes)]
    if notes:
        lines += ["", "## Notes", "", *notes]
    return "\n".join(lines) + "\n"


def _expected(board: Board) -> list[tuple[str, str]]:
    used, speed = CLIENT_MIB / float(board.memory_mib), float(board.relative_cpu_speed)
    return [
        ("what is installed", "the client, [about 20 MB](index.md#sizes)"),
        ("installation at the first start", "not measured here; 63 s of processor time where aarch64 was emulated"),
        (
            "memory of the client",
            f"{CLIENT_MIB} MiB at most with `fashion-mnist-cnn` (measured on x86): {100 * used:.0f} % of what it has",
        ),
        ("speed of a core", f"about {speed:g} of a 3 GHz AVX2 core (estimated)"),
        ("a round of that network", f"about {ROUND_S / speed:.0f} s (estimated; measured on x86: {ROUND_S} s)"),
    ]


def _number(quantity: Quantity) -> str:
    return f"{'about ' if quantity.estimated else ''}{quantity.value:g}"


def write_pages(folder: Path) -> None:
    """One file for each of `PAGES`."""
    for name, (title, boards) in PAGES.items():
        (folder / f"{name}.md").write_text(page(title, tuple(load_board(board) for board in boards)), "utf-8")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
