"""Evaluators: accuracy, losses, and the predictions of each class."""
