"""The live engine: a real broker, real processes, boards and links emulated."""
