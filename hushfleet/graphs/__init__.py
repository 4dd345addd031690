"""Checks ONNX graphs on a board, bounds their cost, and runs them."""
