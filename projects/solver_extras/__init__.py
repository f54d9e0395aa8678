"""LARS, several optimizers in one, parameter groups by rules, and composed schedules."""
