"""Train models that were not written for trainkit."""
