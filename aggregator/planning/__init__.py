"""Estimates, before a board is flashed, whether a fleet gains by taking part."""
