"""Rounds: when they open, who takes part, when they close, what comes of them."""
