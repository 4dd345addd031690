"""`hushfleet plan`: will it pay, and what would it take."""
