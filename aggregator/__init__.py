"""The server beside the GPU: rounds, their store, the network around them, and the report."""
