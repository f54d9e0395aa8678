"""Entries of a checkpoint that was chosen by the score of other weights than those which are trained."""

EVALUATED = "evaluated"  # which weights were scored: "ema" for an average, "model" for the model's own
TRAINED = "trained_model"  # the weights for resuming, if "model" is the average
