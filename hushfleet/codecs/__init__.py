"""Codecs encode and decode the values of an update. `registry` lists them all."""
