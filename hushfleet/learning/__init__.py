"""Learns on a device: gradients, optimizers, draws, the device's personalized model, and the graphs of networks on a
board."""
