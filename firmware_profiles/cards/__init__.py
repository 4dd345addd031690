"""Makes cards that start the client from a board's stock image. Runs on the operator's machine."""
