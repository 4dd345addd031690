"""Messages, chunks, encoded updates and model differences, as bytes."""
