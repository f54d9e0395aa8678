"""What this project brings to trainkit."""

NAMES = {
    "gradients": "trainkit.projects.non_finite.trainers",
    "skip": "trainkit.projects.non_finite.trainers",
}
