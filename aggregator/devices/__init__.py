"""The register of devices that may take part."""
