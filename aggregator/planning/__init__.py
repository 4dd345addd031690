"""Whether a fleet gains by taking part, before a board is flashed."""
