"""Local training of many clients as arrays `[clients, d]` in one process."""
