"""The virtual clock: computes the time, bytes and energy that a fleet would need, without waiting."""
