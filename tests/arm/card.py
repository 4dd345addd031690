"""A card as it is sold: a boot partition (FAT) and a root (ext4) in one image file; and the machine that boots it.

Debian's kernel and a small initrd lie beside the image, since QEMU's `virt` machine has no Raspberry Pi's boot loader.
"""

from __future__ import annotations

import gzip
import lzma
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from arm.roots import card_root, kernel_root

SECTOR = 512
BOOT_START, BOOT_SECTORS = 8192, 524288  # as on Raspberry Pi OS: 4 MiB, then 256 MiB
ROOT_MIB = 1400
MODULES = (
    "virtio_pci virtio_mmio virtio_blk libcrc32c crc32c_generic crc32c_cryptoapi ext4 vfat nls_cp437 nls_iso8859-1 "
    "nls_ascii virtio_net virtio_rng"
)
# What Raspberry Pi OS Trixie has: the seed lies on the boot partition.
SEED_FROM = "datasource_list: [NoCloud, None]\ndatasource:\n  NoCloud:\n    seedfrom: file:///boot/firmware\n"
# Slow under emulation, and not what is tested.
MASKED = (
    "apt-daily.service apt-daily-upgrade.service dpkg-db-backup.service e2scrub_reap.service fstrim.service "
    "systemd-firstboot.service systemd-hwdb-update.service systemd-pstore.service "
    "systemd-networkd-wait-online.service systemd-time-wait-sync.service systemd-timesyncd.service"
)
_PATH = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}


def stock_image(out: Path) -> Path:
    """A card with Debian's arm64 system and cloud-init, that nobody has configured. Kernel and initrd: beside it."""
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        work = Path(name)
        root = work / "root"
        root.mkdir()
        _run("cp", "-a", f"{card_root()}/.", root)
        _add_kernel(root, out)
        (root / "etc/fstab").write_text("# the initrd mounts both\n")
        (root / "etc/machine-id").write_text("")
        (root / "boot/firmware").mkdir(parents=True, exist_ok=True)
        (root / "etc/cloud/cloud.cfg.d").mkdir(parents=True, exist_ok=True)
        (root / "etc/cloud/cloud.cfg.d/99-card.cfg").write_text(SEED_FROM)
        for unit in MASKED.split():
            link = root / "etc/systemd/system" / unit
            link.unlink(missing_ok=True)
            link.symlink_to("/dev/null")
        wanted = root / "etc/systemd/system/multi-user.target.wants/cloud-init.target"
        if not wanted.is_symlink():
            wanted.parent.mkdir(parents=True, exist_ok=True)
            wanted.symlink_to("/usr/lib/systemd/system/cloud-init.target")
        boot, system = work / "boot.fat", work / "root.ext4"
        _run("mkfs.vfat", "-n", "bootfs", "-C", boot, BOOT_SECTORS // 2)
        # what a Raspberry Pi's boot partition is known by
        for file, text in (("config.txt", "arm_64bit=1\n"), ("cmdline.txt", "console=tty1 root=/dev/vda2 rootwait\n")):
            (work / file).write_text(text)
            _run("mcopy", "-i", boot, work / file, f"::/{file}")
        _run("mke2fs", "-q", "-t", "ext4", "-L", "rootfs", "-d", root, system, f"{ROOT_MIB}M")
        root_start = BOOT_START + BOOT_SECTORS
        out.unlink(missing_ok=True)
        with out.open("wb") as image:
            image.truncate((root_start + 2048) * SECTOR + (ROOT_MIB << 20))
        table = f"label: dos\nstart={BOOT_START}, size={BOOT_SECTORS}, type=c\nstart={root_start}, type=83\n"
        _run("sfdisk", "-q", out, text=table)
        for part, start in ((boot, BOOT_START), (system, root_start)):
            _run("dd", f"if={part}", f"of={out}", "bs=4M", f"seek={start * SECTOR}", "oflag=seek_bytes",
                 "conv=notrunc,sparse", "status=none")  # fmt: skip
    return out


def _add_kernel(root: Path, image: Path) -> None:
    """Modules into the root; beside the image its kernel, and an initrd that mounts both partitions."""
    kernel = kernel_root()
    modules = next((kernel / "usr/lib/modules").iterdir())
    version = modules.name
    (root / "usr/lib/modules").mkdir(exist_ok=True)
    _run("cp", "-a", modules, root / "usr/lib/modules/")
    _run("depmod", "-b", root, version)
    shutil.copy(next((kernel / "boot").glob("vmlinuz-*")), image.with_suffix(".kernel"))
    with tempfile.TemporaryDirectory() as name:
        ram = Path(name)
        for folder in ("bin", "proc", "sys", "dev", "sysroot", "modules"):
            (ram / folder).mkdir()
        shutil.copy(kernel / "usr/bin/busybox", ram / "bin/busybox")
        (ram / "bin/sh").symlink_to("busybox")
        lines = ["#!/bin/busybox sh", *(f"/bin/busybox mount -t {kind} none /{where}" for kind, where in (
            ("devtmpfs", "dev"), ("proc", "proc"), ("sysfs", "sys")))]  # fmt: skip
        for module in _in_order(root / "usr/lib/modules" / version):
            plain = module.name.removesuffix(".xz")
            data = module.read_bytes()
            (ram / "modules" / plain).write_bytes(lzma.decompress(data) if module.suffix == ".xz" else data)
            lines.append(f"/bin/busybox insmod /modules/{plain}")
        lines += [
            "for t in 1 2 3 4 5 6 7 8 9; do [ -b /dev/vda2 ] && break; /bin/busybox sleep 1; done",
            "/bin/busybox mount -t ext4 /dev/vda2 /sysroot",
            "/bin/busybox mount -t vfat /dev/vda1 /sysroot/boot/firmware",
            "exec /bin/busybox switch_root /sysroot /usr/lib/systemd/systemd",
        ]
        (ram / "init").write_text("\n".join(lines) + "\n")
        (ram / "init").chmod(0o755)
        names = "\n".join(str(path.relative_to(ram)) for path in sorted(ram.rglob("*")))
        archive = subprocess.run(
            ["cpio", "-o", "-H", "newc", "--quiet"], cwd=ram, input=names.encode(), capture_output=True, check=True
        ).stdout
        image.with_suffix(".initrd").write_bytes(gzip.compress(archive, 1))


def _in_order(modules: Path) -> list[Path]:
    """The wanted modules, each after what it needs."""
    needs = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        needs[path] = others.split()
    by_name = {Path(path).name.split(".")[0].replace("-", "_"): path for path in needs}
    ordered: dict[str, None] = {}
    for name in MODULES.split():
        path = by_name.get(name.replace("-", "_"))
        if path is not None:
            ordered.update(dict.fromkeys([*reversed(needs[path]), path]))
    return [modules / path for path in ordered]


class Machine:
    """A card in a machine that is switched on: `with Machine(image, log) as machine:`. Its console goes to `log`.

    QEMU's user network: the card reaches this machine as 10.0.2.2, and nothing reaches the card.
    """

    def __init__(self, image: Path, log: Path, *, memory_mib: int = 1024) -> None:
        self.log = log
        self._file = log.open("ab")
        self._read = self._file.tell()
        self._process = subprocess.Popen(
            [
                "nice", "-n", "5", "qemu-system-aarch64", "-M", "virt", "-cpu", "cortex-a53", "-smp", "2",
                "-m", str(memory_mib), "-nographic", "-no-reboot", "-kernel", image.with_suffix(".kernel"),
                "-initrd", image.with_suffix(".initrd"), "-append",
                "console=ttyAMA0 root=/dev/vda2 rw systemd.firstboot=off systemd.default_device_timeout_sec=900 "
                "systemd.journald.forward_to_console=1 systemd.journald.max_level_console=info",
                "-drive", f"file={image},format=raw,if=virtio,cache=writeback",
                "-netdev", "user,id=n", "-device", "virtio-net-pci,netdev=n,romfile=", "-device", "virtio-rng-pci",
            ],
            stdin=subprocess.DEVNULL, stdout=self._file, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def wait_for(self, pattern: str, *, timeout_s: float) -> str:
        """Until the console shows `pattern`, after what was found before. Raises `TimeoutError` with its end."""
        deadline = time.monotonic() + timeout_s
        while True:
            text = self.log.read_bytes()[self._read :].decode("latin-1")  # a character for each byte
            if found := re.search(pattern, text):
                self._read += found.end()
                return found[0]
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise TimeoutError(f"{pattern!r} was not seen; the console ends with:\n{text[-3000:]}")
            time.sleep(0.5)

    def cut_power(self) -> None:
        """What the card's system had not written out is lost; what it had, the card keeps.

        A real card may lose what it has taken without a flush, too: that is not modelled here.
        """
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self.cut_power()
        self._file.close()


def _run(*command: object, text: str | None = None) -> None:
    done = subprocess.run([str(word) for word in command], input=text, env=_PATH, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr[-2000:]}")
