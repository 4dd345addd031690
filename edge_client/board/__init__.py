"""The parts that depend on the board and its owner: configuration, limits, data, supervision."""
