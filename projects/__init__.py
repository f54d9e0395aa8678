"""Example jobs; each folder is one job that uses trainkit's public API."""
