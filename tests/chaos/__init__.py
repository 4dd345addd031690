"""Trouble drawn from a seed for a live fleet, and the audit of what must hold whatever happened."""
