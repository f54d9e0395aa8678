"""LARS, several optimizers in one, parameter groups by rules, and composed schedules."""

from trainkit.projects.solver_extras import schedules as schedules  # `trainkit.solver.schedules`
