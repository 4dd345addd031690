"""The status page of a fleet: read-only, behind a token, without files from elsewhere; and `/metrics` for Prometheus."""
