"""Used by every other package: processes, scalars, logs, environment, registries."""
