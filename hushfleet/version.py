"""The version of this package. A release for boards replaces the number (`firmware_profiles.cards.bundle`)."""

__version__ = "0.3.0"
