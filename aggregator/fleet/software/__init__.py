"""The software of boards: cards, releases and their roll-out."""
