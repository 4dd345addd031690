"""Learns on a device: gradients, optimizers, draws, the device's own model, and the graphs of networks on a board."""
