"""Scripts that measure the project beside its alternatives and print ratios.

A package of its own, or else another installed package of that name would be found in its place.
"""
