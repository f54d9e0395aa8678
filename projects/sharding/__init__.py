"""Models and checkpoints of which each rank holds a part."""
