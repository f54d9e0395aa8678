"""Runs side by side, in a picture or on a page for a browser."""
