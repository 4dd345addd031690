"""What depends on the board and its owner: configuration, limits, data, supervision."""
