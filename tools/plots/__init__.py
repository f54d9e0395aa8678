"""The parts of plot_metrics.py."""
