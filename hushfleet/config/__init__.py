"""Defines the task package that devices receive, and reads typed values from untrusted data."""
