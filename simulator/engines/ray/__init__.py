"""The fast engine on a Ray cluster."""
