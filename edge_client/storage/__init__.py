"""The store of a device, which survives a power cut at any moment."""
