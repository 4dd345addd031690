"""The sub-commands of `hushfleet fleet`."""
