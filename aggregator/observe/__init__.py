"""Events, metrics and the live display of a run."""
