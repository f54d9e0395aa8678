"""The error of every mistake in a config."""


class ConfigError(ValueError):
    """A config file, a command line or a value in them is wrong; the text says where and what is accepted."""
