"""The boards of a fleet: its authority, certificates, registry and enrolment, and the lists that follow from them."""
