"""Small clients in the manner of projects that were written for detectron2."""
