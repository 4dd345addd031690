"""Cards: from the stock image of a board to a card that starts the client. Runs on the operator's machine."""
