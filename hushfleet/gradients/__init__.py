"""Gradients of one device's batches: networks as functions, optimizers, random draws, the device's own samples."""
