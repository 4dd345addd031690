"""The fast engine: worker processes, one device after the other in each."""
