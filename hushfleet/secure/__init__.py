"""Secure sums: an aggregator that did not make the roster learns the sum of a round's updates and nothing else of them.

Packed Shamir shares (Franklin, Yung, STOC 1992) of each device's mask lie with a committee; all but a few of them are
pseudorandom, from keys that two boards share, and are never sent. docs/privacy.md has the protocol and its proof.
"""
