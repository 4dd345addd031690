"""Who is a board of the fleet: authority, certificates, registry, enrolment, and the lists that follow from them."""
