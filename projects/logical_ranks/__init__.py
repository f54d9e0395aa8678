"""Runs that end with the same bits on any number of processes."""
