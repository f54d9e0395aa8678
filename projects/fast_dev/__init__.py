"""The option ``--fast-dev-run``."""
