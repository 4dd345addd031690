"""The duties of a board for its fleet, besides training: enrolment, health, updates."""
