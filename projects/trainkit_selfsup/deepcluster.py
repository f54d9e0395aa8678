"""The hook of DeepCluster (arXiv:1807.05520)."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Subset

from trainkit.config import CfgNode, ConfigError
from trainkit.data import DatasetCatalog, build_test_loader, build_train_loader, resume_obstacle
from trainkit.engine.hooks import HOOK_REGISTRY, check_period, is_due, is_due_epoch
from trainkit.evaluation import inference_context
from trainkit.utils import comm
from trainkit.utils.device import move_to_device
from trainkit.utils.env import preserve_rng_state
from trainkit_selfsup.clustering import kmeans, uniform_indices, whiten
from trainkit_selfsup.protocol import ClusterHook

logger = logging.getLogger(__name__)


@HOOK_REGISTRY.register()
class DeepClusterHook(ClusterHook):
    """Cluster the features of the training data, use the clusters as labels, and initialize the head again.

    The model has ``extract_feat(batch)``, which returns ``[n, D]``, or maps (their mean is used), or a tuple (its last
    entry is used). If the model has a ``neck``, it gets this output. The model has ``head`` with ``init_weights()``.
    Every clustering initializes the parameters of the head again, and the optimizer drops their state.

    The data: the dataset of the trainer's loader has ``assign_labels(labels)``, with one int per sample, and for
    ``unif_sampling`` the sampler has ``set_uniform_indices(labels, k)``. Or the trainer has a config with one dataset,
    which is a list of dicts or has ``assign_labels(labels)``; a dict gets its label under ``label_key``, and
    `trainkit.data.build_train_loader` makes the new loader. Batches that were loaded ahead with old labels are dropped.
    If the loader knows its position in the data, training continues from there; another loader starts a new pass.

    The hook runs before checkpoints are written. Rank 0 finds the clusters for all ranks. Raises ConfigError before
    training: the model or the data do not have what is needed, or the model is sharded.

    Args:
        clustering: ``k`` is the number of clusters. They are found in the first ``pca_dim`` (256) principal components,
            whitened and with length 1 (section 4.1), or with ``pca_dim: None`` in the features with length 1. ``type``
            is Kmeans.
        unif_sampling: draw each cluster equally often.
        reweight: set ``loss_weight`` of the model, a buffer ``[k]``; ``head.loss.class_weight``, if there is one,
            becomes the same tensor. A cluster of n samples has the weight ``(n + 1e-10) ** -reweight_pow``, divided by
            the sum of all.
        init_memory: call ``memory_bank.init_memory(features, labels)`` of the model, with ``[N, D]`` and ``[N]``.
        initial: also cluster before the first iteration.
        interval: epochs from one clustering to the next.
        period: iterations from one clustering to the next, instead of ``interval``; in a config also "6ep".
        extract_dataloader: loads all training data in their order, for the features; default is the training data of
            the config with INPUT.TEST_TRANSFORM.
        label_key: the key of the label in a sample that is a dict, see above.
    """

    _state_names = ("_labels", "_drawn", "_num_clusterings")

    def __init__(
        self,
        clustering: Mapping[str, Any],
        unif_sampling: bool = False,
        reweight: bool = False,
        reweight_pow: float = 0.5,
        init_memory: bool = False,
        initial: bool = True,
        interval: int = 1,
        period: int | None = None,
        extract_dataloader: Iterable[Any] | None = None,
        label_key: str = "label",
    ) -> None:
        super().__init__(reweight, reweight_pow)
        options: dict[str, Any] = {"type": "Kmeans", "pca_dim": 256}
        for key, value in clustering.items():
            options[str(key).lower()] = value
        if options["type"] != "Kmeans" or options.keys() != {"type", "k", "pca_dim"}:
            raise ValueError(
                f"clustering must be {{type: Kmeans, k: ..., pca_dim: ...}}, got {dict(clustering)}"
            )
        self._num_clusters = check_period("k", options["k"], minimum=2)
        self._dim = options["pca_dim"]
        if self._dim is not None:
            check_period("pca_dim", self._dim, minimum=1)
        self._unif_sampling = unif_sampling
        self._init_memory = init_memory
        self._initial = initial
        self._interval = check_period("interval", interval, minimum=1)
        self._period = period
        if period is not None:
            self._period = check_period("period", period, minimum=1)
        self._extract_dataloader = extract_dataloader
        self._label_key = label_key
        self._labels: Tensor | None = None  # of all samples, [N]
        self._drawn: Tensor | None = None  # the drawn indices, with unif_sampling
        self._num_clusterings = 0
        self._is_loaded = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._is_loaded = True

    def before_train(self) -> None:
        needed = ["extract_feat", "head.init_weights"]
        if self._init_memory:
            needed.append("memory_bank.init_memory")
        self.find_model(*needed)
        self._cfg: Any = getattr(self.trainer, "cfg", None)
        self._check_data()
        if self.trainer.start_iter == 0 and not self._is_loaded:
            self._labels = None
            self._num_clusterings = 0
        if self._labels is not None:
            self._load_data(self._labels)
        elif self._initial:
            self._cluster()
        self._is_loaded = False

    def _check_data(self) -> None:
        loader = self.trainer.data_loader
        dataset = getattr(loader, "dataset", None)
        self._has_own_labels = hasattr(dataset, "assign_labels")
        has_own_data = self._has_own_labels and self._extract_dataloader is not None
        if self._cfg is None and not has_own_data:
            raise ConfigError(
                "DeepClusterHook needs a config, or extract_dataloader and dataset.assign_labels()"
            )
        keeps_workers = getattr(loader, "persistent_workers", False)
        if self._has_own_labels and keeps_workers and resume_obstacle(loader):
            raise ConfigError(
                "DeepClusterHook: workers with persistent_workers do not see new labels; set "
                "it to False"
            )
        if self._period is None and not self.trainer.has_epochs:
            raise ConfigError(
                "DeepClusterHook: interval counts epochs, but the data has no length; give period"
            )

    def after_step(self) -> None:
        if self._period is not None:
            ends = is_due(self.trainer, self._period)
        else:
            ends_epoch = is_due(self.trainer, self.trainer.epoch_length)
            ends = ends_epoch and is_due_epoch(self.trainer, self._interval)
        if ends:
            self._cluster()

    def _cluster(self) -> None:
        features = self._extract_features()
        if self._dim is not None and self._dim > features.shape[1]:
            raise ConfigError(
                f"pca_dim must be from 1 to the {features.shape[1]} features, got {self._dim}"
            )
        found: Any = None
        if comm.is_main_process():
            found = self._find_clusters(features)
        labels, self._drawn, head = comm.broadcast(found)
        self._model.head.load_state_dict(head)
        self._reset_optimizer_of_head()
        sizes = torch.bincount(labels, minlength=self._num_clusters)
        self.weight_classes(sizes)
        if self._init_memory:
            self._model.memory_bank.init_memory(features, labels)
        self._labels = labels
        self._num_clusterings += 1
        self._load_data(labels)
        self.put_sizes(sizes)
        logger.info(
            "Clustering %d: %d to %d samples", self._num_clusterings, sizes.min(), sizes.max()
        )

    def _find_clusters(self, features: Tensor) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """The labels, the drawn indices (None: all samples), and the state of the new head."""
        if self._dim is None:
            rows = F.normalize(features)
        else:
            rows = whiten(features, self._dim)
        labels, _ = kmeans(rows, self._num_clusters, torch.default_generator)
        drawn = None
        if self._unif_sampling:
            drawn = uniform_indices(labels, torch.default_generator)
        return labels, drawn, self._new_head()

    def _reset_optimizer_of_head(self) -> None:
        for parameter in self._model.head.parameters():
            state = self.trainer.optimizer.state.get(parameter, {})
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()  # as optimizers start

    @torch.no_grad()
    def _extract_features(self) -> Tensor:
        """The features of the training data in their order, ``[N, D]`` on the CPU, equal on all ranks.

        Of the data of a config every rank reads a part, of a given loader rank 0 reads all.
        """
        device = next(self._model.parameters()).device
        batches = self._extract_dataloader
        found: list[Tensor] = []
        with preserve_rng_state(), inference_context(self._model):
            if batches is None:
                batches = build_test_loader(self._cfg, _dataset_name(self._cfg))
            elif not comm.is_main_process():
                batches = ()
            for batch in batches:
                features = self._embed(move_to_device(batch, device))
                found.append(features.float().cpu())
        of_all: list[Tensor] = []
        for of_rank in comm.all_gather(found):
            of_all += of_rank
        return torch.cat(of_all)

    def _embed(self, batch: Any) -> Tensor:
        """``[n, D]``; of a tuple or list the last entry, of a map the mean over all positions."""
        found = self._model.extract_feat(batch)
        if getattr(self._model, "neck", None) is not None:
            found = self._model.neck(found)
        if isinstance(found, tuple | list):
            found = found[-1]
        if found.ndim == 2:
            return found
        return found.flatten(2).mean(2)

    def _new_head(self) -> dict[str, Tensor]:
        head = self._model.head
        if hasattr(head, "_is_init"):
            head._is_init = False  # otherwise the modules of mmengine do nothing
        head.init_weights()
        return {name: value.detach().cpu() for name, value in head.state_dict().items()}

    def _load_data(self, labels: Tensor) -> None:
        loader = self.trainer.data_loader
        place = None if resume_obstacle(loader) else loader.state_dict()
        if self._has_own_labels:
            loader.dataset.assign_labels(labels.tolist())
            if self._unif_sampling:
                loader.sampler.set_uniform_indices(labels.tolist(), self._num_clusters)
            self.trainer.reset_data_loader(lambda: loader)
        else:
            self.trainer.reset_data_loader(
                lambda: build_train_loader(self._cfg, self._labelled(labels))
            )
        if place is not None:
            self.trainer.data_loader.load_state_dict(place)

    def _labelled(self, labels: Tensor) -> Any:
        dataset: Any = DatasetCatalog.get(_dataset_name(self._cfg))
        if hasattr(dataset, "assign_labels"):
            dataset.assign_labels(labels.tolist())
        else:
            samples = zip(dataset, labels.tolist(), strict=True)
            dataset = [{**sample, self._label_key: label} for sample, label in samples]
        if self._drawn is None:
            return dataset
        return Subset(dataset, self._drawn.tolist())


def _dataset_name(cfg: CfgNode) -> str:
    if len(cfg.DATASETS.TRAIN) != 1:
        raise ConfigError(
            f"DATASETS.TRAIN must name the one dataset to cluster, got {list(cfg.DATASETS.TRAIN)}"
        )
    return cfg.DATASETS.TRAIN[0]
