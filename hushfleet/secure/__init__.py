"""Secure aggregation: an aggregator that did not make the membership list learns only the sum of a round's updates.

A committee holds packed Shamir shares (Franklin, Yung, STOC 1992) of each device's mask. Most shares are pseudorandom,
derived from keys that two boards share, and are never sent. docs/privacy.md has the protocol and its proof.
"""
