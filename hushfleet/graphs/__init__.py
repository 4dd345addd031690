"""ONNX graphs on a board: what a received one may contain, what it costs, and how it is run."""
