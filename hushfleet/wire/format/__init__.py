"""What travels: messages, chunks, encoded updates, model differences."""
