"""Codecs: the ways in which the values of an update are written. `registry` has them all."""
