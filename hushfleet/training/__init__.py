"""One local round of one device, which runs the parts of its method."""
