"""Sound on the board: `hushfleet-edge listen`. What it hears leaves the board only to a broker of the owner."""
