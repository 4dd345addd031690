"""Who may take part."""
