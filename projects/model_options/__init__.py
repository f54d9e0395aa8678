"""Memory format, activation checkpointing and compilation of a model, by keys of a config."""
