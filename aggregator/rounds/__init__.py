"""Rounds of a run: when they open, who takes part, when they close, and their results."""
