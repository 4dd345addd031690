"""The server on the GPU machine: rounds, their store, the network around them, and the report."""
