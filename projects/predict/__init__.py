"""Predictions for samples outside of datasets."""
