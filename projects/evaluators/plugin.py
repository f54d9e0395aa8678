"""What this project brings to trainkit."""

NAMES = {
    "ClassificationEvaluator": "trainkit.projects.evaluators.classification",
    "ConfusionMatrixEvaluator": "trainkit.projects.evaluators.classification",
    "Metadata": "trainkit.projects.evaluators.classification",
    "MetadataCatalog": "trainkit.projects.evaluators.classification",
    "SemSegEvaluator": "trainkit.projects.evaluators.classification",
    "LossEvaluator": "trainkit.projects.evaluators.loss",
}
LENDS = {
    "trainkit.data": ["Metadata", "MetadataCatalog"],
    "trainkit.data.catalog": ["Metadata", "MetadataCatalog"],
    "trainkit.evaluation": ["ClassificationEvaluator", "LossEvaluator", "SemSegEvaluator"],
}
