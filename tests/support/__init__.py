"""Fleets, devices and samples that tests of several folders use."""
