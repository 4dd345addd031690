"""`hushfleet reproduce`: runs a paper's table, and shows it beside the paper's own numbers."""
