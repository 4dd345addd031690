"""Hushfleet's ground floor: what a device and the aggregator must agree on.

Nothing here imports PyTorch or a network model, so a board can import all of it.
"""

__version__ = "0.3.0"
