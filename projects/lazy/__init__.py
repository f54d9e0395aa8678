"""Configs written in Python, with calls that are made later."""
