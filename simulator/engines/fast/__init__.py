"""The fast engine: worker processes, each of which runs one device after the other."""
