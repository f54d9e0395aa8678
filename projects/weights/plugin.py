"""What this project brings to trainkit."""

NAMES = {
    "load_trusted_pickle": "trainkit.projects.weights.pickles",
    "safetensors": "trainkit.projects.weights.safetensors",
}
LENDS = {"trainkit.checkpoint": ["load_trusted_pickle"]}
FORMATS = ["safetensors"]
