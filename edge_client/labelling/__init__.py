"""New images and their labels on the board: `hushfleet-edge add` and `hushfleet-edge label`."""
