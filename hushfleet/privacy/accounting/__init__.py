"""Conversion of noise multipliers to epsilon."""
