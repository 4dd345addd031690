"""One local round of one device, by the parts of its method."""
