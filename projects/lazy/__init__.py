"""The digits job from configs in Python."""
