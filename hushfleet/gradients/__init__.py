"""Gradients of one device's batches: networks as functions, optimizers, draws, the device's own samples."""
