"""The option ``--preflight``: whether a job is sound, before it costs a night."""
