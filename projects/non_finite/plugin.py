"""What this project brings to trainkit."""

NAMES = {
    "gradients": "trainkit.projects.non_finite.policies",
    "skip": "trainkit.projects.non_finite.policies",
}
