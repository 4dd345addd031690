"""From noise multipliers to epsilon."""
