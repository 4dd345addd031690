"""Makes and checks releases of the board's software: one signed file for memory cards and for updates, `NAME.hfr`.

It uses only the standard library and `hushfleet.public_keys`, because both are also part of `slots.pyz`
(`firmware_profiles/cards/seed.py`), which is on a board outside of any release.
"""
