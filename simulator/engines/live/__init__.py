"""The live engine: a real broker and real processes, with emulated boards and links."""
