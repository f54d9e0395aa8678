"""What this project brings to trainkit."""

NAMES = {"DefaultPredictor": "trainkit.projects.predict.predictor"}
LENDS = {
    "trainkit.engine": ["DefaultPredictor"],
    "trainkit.engine.defaults": ["DefaultPredictor"],
}
