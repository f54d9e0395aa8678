"""DeepCluster and ODC, of the project and written as MMSelfSup's."""

import itertools
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from projects.digits import load_split
from projects.selfsup import normalized_mutual_info
from tests.engine.job import tiny_cfg
from tests.two_ranks import on_two_ranks
from trainkit.config import get_cfg
from trainkit.data import DatasetCatalog
from trainkit.engine import DefaultTrainer, HookBase
from trainkit.modeling import MODEL_REGISTRY
from trainkit.utils.device import unwrap_model
from trainkit.utils.env import seed_all_rng
from trainkit_selfsup import ODCMemory
from trainkit_selfsup.clustering import kmeans, whiten
from trainkit_selfsup.protocol import loss_weights

FOLDER = Path(__file__).parents[2] / "projects" / "selfsup"
SCANS = [
    {"image": sample["image"], "index": index}
    for index, sample in enumerate(load_split("train")[:24])
]
DatasetCatalog.register("few_scans", lambda: SCANS)

OPTIONS = [
    "MODEL.DEVICE",
    "cpu",
    "DATASETS.TRAIN",
    ["few_scans"],
    "DATASETS.VAL",
    [],
    "DATASETS.TEST",
    [],
]
OPTIONS += [
    "SOLVER.MAX_ITER",
    8,
    "SOLVER.IMS_PER_BATCH",
    4,
    "SOLVER.CHECKPOINT_PERIOD",
    3,
    "TEST.EVAL_PERIOD",
    0,
]
OPTIONS += ["LOG.PERIOD", 2, "LOG.WRITERS", ["json"], "MODEL.WIDTH", 2, "SOLVER.WARMUP_ITERS", 1]
DEEPCLUSTER = {"NAME": "DeepClusterHook", "PERIOD": 3, "CLUSTERING": {"k": 6, "pca_dim": 2}}
DEEPCLUSTER |= {"REWEIGHT": True, "REWEIGHT_POW": 1.0}
INIT = {
    "NAME": "DeepClusterHook",
    "PERIOD": 1000,
    "CLUSTERING": {"k": 6, "pca_dim": None},
    "INIT_MEMORY": True,
}
ODC = {"NAME": "ODCHook", "CENTROIDS_UPDATE_INTERVAL": 2, "DEAL_WITH_SMALL_CLUSTERS_INTERVAL": 3}
ODC |= {"EVALUATE_INTERVAL": 1}
ODC_MODEL = {"NUM_CLUSTERS": 6, "HIDDEN_DIM": 4, "DIM": 3, "MOMENTUM": 0.5}
SHORT = {
    "deepcluster.yaml": ["MODEL.DEEPCLUSTER.NUM_CLUSTERS", 6, "HOOKS", [DEEPCLUSTER]],
    "odc.yaml": ["MODEL.ODC", {**ODC_MODEL, "MIN_CLUSTER": 4}, "HOOKS", [INIT, ODC]],
}


def config(name, folder, *options):
    cfg = get_cfg()
    cfg.merge_from_file(str(FOLDER / name))
    cfg.merge_from_list([*OPTIONS, *SHORT[name], "OUTPUT_DIR", str(folder), *options])
    return cfg


def run(cfg, *hooks):
    seed_all_rng(cfg.SEED)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load()
    trainer.register_hooks(hooks)
    trainer.train()
    return trainer


def look(function, point="after_backward"):
    """A hook whose ``found`` lists what ``function(trainer)`` gives in each iteration."""
    spy = type(
        "Look", (HookBase,), {point: lambda self: self.found.append(function(self.trainer))}
    )()
    spy.found = []
    return spy


def test_k_means_finds_clusters_that_lie_apart_and_the_means_of_their_members():
    points = torch.tensor(
        [[0.0, 0.0], [0.0, 2.0], [10.0, 0.0], [10.0, 2.0], [20.0, 8.0], [20.0, 10.0]]
    )
    for seed in range(5):
        labels, centroids = kmeans(points, 3, torch.Generator().manual_seed(seed))
        assert centroids[labels].tolist() == [[0, 1], [0, 1], [10, 1], [10, 1], [20, 9], [20, 9]]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([0, 1, 0, 1], 0.0),
        ([0, 0, 1, 2], 0.8),  # entropies log 2 and 1.5 log 2, of which log 2 is shared
    ],
)
def test_mutual_information_is_0_for_independent_labels_and_normalized_by_the_mean_entropy(
    labels, expected
):
    found = normalized_mutual_info(torch.tensor([0, 0, 1, 1]), torch.tensor(labels))
    assert found == pytest.approx(expected, abs=1e-12)


def test_whitened_features_have_equal_weight_and_a_cluster_counts_by_the_power_of_its_size():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(400, 3, generator=generator) * torch.tensor([100.0, 1.0, 0.0]) + 7
    white = whiten(features, 2)
    assert white.square().sum(1).tolist() == pytest.approx([1.0] * 400)
    torch.testing.assert_close(white.T @ white / 400, torch.eye(2).double() / 2, atol=0.05, rtol=0)
    assert loss_weights(torch.tensor([1, 4, 16]), 0.5).tolist() == pytest.approx(
        [4 / 7, 2 / 7, 1 / 7]
    )
    # one without samples: 1e-10 ** -0.5 = 1e5 beside 1 and 1/2
    assert loss_weights(torch.tensor([1, 4, 0]), 0.5).tolist() == pytest.approx(
        [1 / 1e5, 0.5 / 1e5, 1.0], rel=1e-4
    )


def directions(num, dim, seed=0):
    return F.normalize(torch.randn(num, dim, generator=torch.Generator().manual_seed(seed)))


class LargestResult(TorchDispatchMode):
    """Notes the number of entries of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.entries = max(self.entries, tensor.numel())
        return result


def brute_force_means(features, labels, num_clusters):
    features = features.double().numpy()
    return np.stack([features[labels.numpy() == k].mean(0) for k in range(num_clusters)])


def brute_force_nearest(features, centroids):
    differences = features.double().numpy()[:, None] - centroids[None]
    return np.square(differences).sum(2).argmin(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clusters_that_are_computed_part_by_part_are_those_of_all_at_once_in_less_memory(
    dtype, monkeypatch
):
    features = directions(900, 3).to(dtype)

    def run():
        with LargestResult() as largest:
            labels, centroids = kmeans(features, 40, torch.Generator().manual_seed(1))
        return labels, centroids, largest.entries

    labels, centroids, entries = run()
    assert entries == 900 * 40
    monkeypatch.setattr("trainkit_selfsup.clustering._CHUNK_ENTRIES", 1024)  # 25 rows at a time
    labels_by_part, centroids_by_part, entries = run()
    assert entries <= 1024

    assert torch.equal(labels, labels_by_part)
    torch.testing.assert_close(centroids, centroids_by_part)
    # Lloyd's algorithm has come to its end: each sample is with the nearest mean, in float64 without parts
    expected = brute_force_means(features, labels, 40)
    np.testing.assert_allclose(centroids_by_part.numpy(), expected, atol=1e-6)
    assert labels_by_part.tolist() == brute_force_nearest(features, expected).tolist()


@pytest.mark.parametrize("assign_by", ["inner_product", "distance"])
def test_a_memory_assigns_samples_part_by_part(assign_by, monkeypatch):
    monkeypatch.setattr("trainkit_selfsup.clustering._CHUNK_ENTRIES", 128)  # the matrix has 6,000
    memory = ODCMemory(300, 4, 0.5, 20, 1, assign_by=assign_by)
    features = directions(300, 4)
    with LargestResult() as largest:
        memory.init_memory(features, torch.arange(300) % 20)
        memory.update_samples_memory(torch.arange(300), features)
    assert largest.entries == 300 * 4
    by_class = [features.double()[torch.arange(300) % 20 == k].mean(0) for k in range(20)]
    means_of_all = torch.stack(by_class).numpy()
    if assign_by == "distance":
        expected = brute_force_nearest(features, means_of_all)
    else:
        expected = (features.double().numpy() @ means_of_all.T).argmax(1)
    assert memory.label_bank.tolist() == expected.tolist()


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -1234.567])
def test_features_without_variance_are_whitened_to_zeros(value):
    white = whiten(torch.full((50, 8), value), 4)
    assert white.dtype == torch.float64
    assert torch.equal(white, torch.zeros(50, 4).double())
    # one direction has variance: the other three of four are zero, and each row has length 1
    rows = torch.full((50, 8), value)
    rows[:, 2] += torch.tensor([-1.0, 1.0]).repeat(25)
    white = whiten(rows, 4)
    assert torch.equal(white[:, :3], torch.zeros(50, 3).double())
    assert white[:, 3].abs().tolist() == [1.0] * 50
    assert torch.equal(whiten(rows[:1], 4), torch.zeros(1, 4).double())


def test_whitening_part_by_part_is_that_of_all_at_once(monkeypatch):
    features = directions(200, 6) * torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0, 0.5]) + 3
    monkeypatch.setattr("trainkit_selfsup.clustering._CHUNK_ENTRIES", 64)
    white = whiten(features, 2)
    # the textbook's way: singular values of the centred data
    centered = features.double() - features.double().mean(0)
    u, s, _ = torch.linalg.svd(centered, full_matrices=False)
    variances = s[:2].square() / 200
    expected = u[:, :2] * s[:2] * (variances + 1e-5 * variances[0]).rsqrt()
    expected = expected / expected.square().sum(1, keepdim=True).sqrt()
    torch.testing.assert_close(white.flip(1).abs(), expected.abs(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_are_an_error_that_names_the_first(value):
    features = directions(30, 4)
    features[[7, 11], 2] = value
    text = "must be finite, but 2 of 30 rows have NaN or inf, the first is row 7"
    memory = ODCMemory(30, 4, 0.5, 2, 1)
    for call in (
        lambda: whiten(features, 2),
        lambda: kmeans(features, 2, torch.Generator()),
        lambda: memory.init_memory(features, torch.zeros(30).long()),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(ValueError, match="dim must be 1 to the 4 features, got 5"):
        whiten(directions(30, 4), 5)


@pytest.mark.parametrize("power", [0.0, 0.5, 4.0, 40.0])
def test_weights_of_clusters_are_finite_with_any_power(power):
    weights = loss_weights(torch.tensor([0, 0, 1, 1_000_000]), power).tolist()
    exact = [(n + Fraction(1, 10**10)) ** -1 for n in (0, 0, 1, 1_000_000)]
    powers = [math.exp(power * (math.log(value) - math.log(exact[0]))) for value in exact]
    assert weights == pytest.approx([value / sum(powers) for value in powers], rel=1e-5)


def state_of(trainer):
    """Of the hook after a step, and whether the optimizer has one for the head and for each weight of the backbone."""
    model, state = unwrap_model(trainer.model), trainer.optimizer.state
    parameters = (model.head.weight, *model.backbone.parameters())
    momenta = [any(value.any() for value in state[parameter].values()) for parameter in parameters]
    return trainer.state_dict()["hooks"]["DeepClusterHook"], momenta


def clustered(folder):
    """A trainer, the states after its steps, and the indices and labels of the samples that it has trained on."""
    batches = look(lambda trainer: (trainer.batch["index"], trainer.batch["label"]))
    states = look(state_of, "after_step")
    trainer = run(config("deepcluster.yaml", folder), batches, states)
    return trainer, states.found, *map(torch.stack, zip(*batches.found, strict=True))


def test_the_data_are_clustered_every_third_iteration_and_batches_have_the_labels_of_the_last_clustering(
    tmp_path,
):
    _, states, index, label = clustered(tmp_path)
    assert [state["num_clusterings"] for state, _ in states] == [1, 1, 2, 2, 2, 3, 3, 3]
    labels = [state["labels"] for state, _ in states]
    changed = [not torch.equal(before, after) for before, after in itertools.pairwise(labels)]
    assert changed == [False, True, False, False, True, False, False]
    assert [sorted(of_one.unique().tolist()) for of_one in labels] == [[*range(6)]] * 8

    known = torch.stack([labels[0], *labels[:-1]])
    assert torch.equal(label, known.gather(1, index))
    assert not torch.equal(label, known[:1].expand_as(known).gather(1, index))

    # the optimizer forgets the old head and nothing else
    for iter, (_, (head, *backbone)) in enumerate(states):
        assert head == (iter not in (2, 5))
        assert all(backbone)


class ClsHead(nn.Module):
    """As a module of MMEngine: it initializes itself once, unless ``_is_init`` is set back."""

    def __init__(self):
        super().__init__()
        self.fc_cls, self.loss = nn.Linear(3, 4), nn.CrossEntropyLoss()
        self.loss.class_weight = None
        self._is_init, self.num_inits = True, 0

    def init_weights(self):
        if not self._is_init:
            self.num_inits += 1
            nn.init.normal_(self.fc_cls.weight, std=0.5)
            self._is_init = True

    def forward(self, feats, labels):
        return F.cross_entropy(self.fc_cls(feats[-1]), labels, weight=self.loss.class_weight)


@MODEL_REGISTRY.register()
class ForeignDeepCluster(nn.Module):
    """Written as MMSelfSup's, with its names: a backbone that gives a tuple of maps, a neck, a head with a loss."""

    def __init__(self, cfg=None):
        super().__init__()
        self.backbone, self.head = nn.Linear(5, 3 * 4), ClsHead()
        self.register_buffer("loss_weight", torch.ones(4) / 4)

    def neck(self, maps):
        return [maps[-1].mean((2, 3))]

    def extract_feat(self, batch):
        first = self.backbone(batch["x"]).reshape(-1, 3, 2, 2)
        return first - 1, first.tanh()

    def forward(self, batch):
        return {"loss": self.head(self.neck(self.extract_feat(batch)), batch["clustering_label"])}


VECTORS = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
DatasetCatalog.register(
    "foreign_train", lambda: [{"x": x, "sample_idx": i} for i, x in enumerate(VECTORS)]
)
DEEP = {
    "NAME": "DeepClusterHook",
    "CLUSTERING": {"type": "Kmeans", "k": 4, "pca_dim": 2},
    "REWEIGHT": True,
}
DEEP |= {"LABEL_KEY": "clustering_label"}
UNIFORM = {"UNIF_SAMPLING": True, "INITIAL": True, "PERIOD": 4}


def foreign(folder, hook=UNIFORM):
    """12 iterations of 4 samples, six per epoch, saved after every third."""
    return tiny_cfg(
        folder,
        *(
            "MODEL.NAME",
            "ForeignDeepCluster",
            "DATASETS.TRAIN",
            ("foreign_train",),
            "DATASETS.TEST",
            (),
        ),
        *(
            "INPUT.TRAIN_TRANSFORM",
            "",
            "INPUT.TEST_TRANSFORM",
            "",
            "TEST.EVAL_PERIOD",
            0,
            "SOLVER.STEPS",
            (4,),
        ),
        *(
            "SOLVER.MAX_ITER",
            12,
            "SOLVER.IMS_PER_BATCH",
            4,
            "SOLVER.CHECKPOINT_PERIOD",
            3,
            "SOLVER.MOMENTUM",
            0.9,
        ),
        *("HOOKS", [{**DEEP, **hook}]),
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"INTERVAL": 1}, [1] * 5 + [2] * 6 + [3]),  # six iterations per epoch
        ({"PERIOD": "1ep"}, [1] * 5 + [2] * 6 + [3]),
        (UNIFORM, [1] * 3 + [2] * 4 + [3] * 4 + [4]),
    ],
)
def test_a_foreign_model_is_clustered_at_each_interval_and_its_head_starts_again(
    tmp_path, options, expected
):
    def counts(trainer):
        state = trainer.state_dict()["hooks"]["DeepClusterHook"]
        return state["num_clusterings"], trainer.model.head.num_inits

    spy = look(counts, "after_step")
    trainer = run(foreign(tmp_path, options), spy)
    assert spy.found == [(count, count) for count in expected]
    assert torch.equal(trainer.model.head.loss.class_weight, trainer.model.loss_weight)


def unit(*degrees):
    angles = torch.tensor(degrees).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def memory(degrees, labels, num_clusters, momentum=0.5, **options):
    options = {"min_cluster": 1, **options}
    filled = ODCMemory(len(degrees), 2, momentum, num_clusters, **options)
    filled.init_memory(3 * unit(*degrees), torch.tensor(labels))
    return filled


# the centroids: (0.5, 0) of directions 60 degrees to both sides of 0, and (0, 1); a sample at 30 degrees has the inner
# products 0.433 and 0.5 with them, and the distances 0.620 and 1.0
@pytest.mark.parametrize(("options", "label"), [({}, 1), ({"assign_by": "distance"}, 0)])
def test_a_sample_joins_the_cluster_of_the_largest_inner_product_as_in_the_original(options, label):
    filled = memory(
        [60.0, -60.0, 90.0, 90.0], [0, 0, 1, 1], num_clusters=2, momentum=1.0, **options
    )
    # the share of changes
    assert filled.update_samples_memory(torch.tensor([0, 3]), unit(30.0, 30.0)).item() == 0.5
    assert filled.label_bank.tolist() == [label, 0, 1, label]


def test_small_clusters_join_the_others_and_become_halves_of_the_largest():
    degrees = [0.0, 1.0, 40.0, 41.0, 42.0, 90.0, 91.0, 180.0, 170.0]
    filled = memory(degrees, [0, 0, 0, 0, 0, 1, 1, 2, 1], num_clusters=3, min_cluster=2)
    before = filled.centroids.clone()

    filled.deal_with_small_clusters()
    # the one at 180 joins those at 90, and of those from 0 to 42 one half is the new cluster
    labels = filled.label_bank.tolist()
    assert labels[5:] == [1, 1, 1, 1]
    assert {tuple(labels[:2]), tuple(labels[2:5])} in [{(0, 0), (2, 2, 2)}, {(2, 2), (0, 0, 0)}]
    for cluster in (0, 2):
        expected = filled.feature_bank[filled.label_bank == cluster].mean(0)
        torch.testing.assert_close(filled.centroids[cluster], expected)
    assert torch.equal(filled.centroids[1], before[1])  # until all are updated


def test_odc_follows_the_formulas_step_by_step(tmp_path):
    """Each iteration again by hand: mix, normalize, largest inner product, centroids every second iteration."""
    steps = []

    def before(trainer):
        bank = trainer.model.memory_bank
        steps.append([bank.feature_bank.clone(), bank.label_bank.clone(), bank.centroids.clone()])

    def after(trainer):
        model, index = trainer.model, trainer.batch["index"]
        with torch.no_grad():
            feature = model.neck(model.features(trainer.batch["view1"]))
        old, labels, centroids = steps[-1]
        mixed = F.normalize(0.5 * old[index] + 0.5 * F.normalize(feature))
        expected = (mixed @ centroids.T).argmax(1)
        torch.testing.assert_close(model.memory_bank.feature_bank[index], mixed)
        assert torch.equal(model.memory_bank.label_bank[index], expected)
        return bool((expected != labels[index]).any())

    spies = [look(before, "before_step"), look(after)]
    keep = {**ODC, "DEAL_WITH_SMALL_CLUSTERS_INTERVAL": 100}
    run(config("odc.yaml", tmp_path, "HOOKS", [INIT, keep]), *spies)

    assert any(spies[1].found)
    assert [not torch.equal(old[2], new[2]) for old, new in itertools.pairwise(steps)] == [
        False,
        True,
    ] * 3 + [False]


def check_deep_cluster(rank, folder):
    trainer, states, index, label = clustered(f"{folder}/deepcluster")
    return states[-1][0]["labels"], unwrap_model(trainer.model).head.weight.detach(), index, label


def check_odc(rank, folder):
    index = look(lambda trainer: trainer.batch["index"])
    trainer = run(config("odc.yaml", f"{folder}/odc"), index)
    return *unwrap_model(trainer.model).memory_bank.buffers(), torch.stack(index.found)


@pytest.mark.slow
def test_two_ranks_have_the_same_labels_head_and_memory_and_share_the_batches_of_one(tmp_path):
    found = on_two_ranks([check_deep_cluster, check_odc], tmp_path)
    (*ours, index, label), (*theirs, other_index, other_label) = found["check_deep_cluster"]
    assert all(map(torch.equal, ours, theirs))
    *_, index_of_one, label_of_one = check_deep_cluster(0, tmp_path / "one")
    assert torch.equal(torch.stack([index, other_index], 2).flatten(1), index_of_one)
    labels = torch.stack([label, other_label], 2).flatten(1)
    assert torch.equal(labels[:3], label_of_one[:3])  # later the weights differ, by batch norm
    *_, index_of_one = check_odc(0, tmp_path / "one")
    (*ours, index), (*theirs, other_index) = found["check_odc"]
    assert all(map(torch.equal, ours, theirs))
    assert torch.equal(torch.stack([index, other_index], 2).flatten(1), index_of_one)
