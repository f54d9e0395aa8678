"""What this project brings to trainkit."""

NAMES = {"losses_from": "trainkit.projects.adapters.logits"}
LENDS = {"trainkit.modeling": ["losses_from"]}
