"""Local training of one device: batches, gradients, optimizers, one round."""
