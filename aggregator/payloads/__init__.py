"""Prepares what a round sends, and checks and sums what it receives: package, model and differences; updates."""
