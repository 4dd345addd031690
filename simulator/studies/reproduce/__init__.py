"""`hushfleet reproduce`: a paper's table, run here, beside the paper's own numbers."""
