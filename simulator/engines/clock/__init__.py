"""The virtual clock: what a fleet would take in time, bytes and energy, computed instead of waited for."""
