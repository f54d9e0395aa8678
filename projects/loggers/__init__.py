"""Further writers: CSV, a progress bar, TensorBoard, and services that compare runs."""
