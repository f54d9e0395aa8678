"""What every other package stands on: processes, scalars, logs, environment, registries."""
