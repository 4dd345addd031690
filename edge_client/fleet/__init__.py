"""What a board does for its fleet, besides training: enrolment, health, updates."""
