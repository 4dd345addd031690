"""The board and its owner: configuration, limits, data, supervision."""
