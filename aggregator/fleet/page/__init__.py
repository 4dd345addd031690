"""The status page of a fleet: read-only, behind a token, no files from elsewhere; and `/metrics` for Prometheus."""
