"""Fuzzing of every decoder that reads bytes from elsewhere."""
