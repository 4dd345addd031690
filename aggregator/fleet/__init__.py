"""The fleet: its folder, who is in it, how boards come in, are watched and are updated. A process of its own."""
