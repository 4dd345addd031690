"""`hushfleet plan`: is taking part worth it, and what does it need."""
