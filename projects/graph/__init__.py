"""The step as a static graph, for models that are small for their GPU."""

from trainkit.projects.graph.trainer import GraphAMPTrainer, GraphTrainer

__all__ = ["GraphAMPTrainer", "GraphTrainer"]
