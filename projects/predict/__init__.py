"""Predictions for samples outside of datasets."""

from trainkit.projects.predict.predictor import DefaultPredictor

__all__ = ["DefaultPredictor"]
