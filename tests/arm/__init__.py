"""aarch64 boards without boards: Debian's arm64 packages, run by QEMU. No privileges, no mounts, no loop devices."""
