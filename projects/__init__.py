"""Capabilities and example jobs; each folder plugs into trainkit and can be deleted."""
