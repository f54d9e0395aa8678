import itertools
from pathlib import Path

import pytest
import torch

from projects.digits import load_split
from projects.selfsup import normalized_mutual_info
from tests.two_ranks import SLOW, on_two_ranks
from trainkit.config import get_cfg
from trainkit.data import DatasetCatalog
from trainkit.engine import DefaultTrainer, HookBase
from trainkit.utils.device import unwrap_model
from trainkit.utils.env import seed_all_rng
from trainkit_selfsup import ODCMemory
from trainkit_selfsup.clustering import kmeans
from trainkit_selfsup.features import loss_weights, whiten

FOLDER = Path(__file__).parents[2] / "projects" / "selfsup"
SCANS = [{"image": sample["image"], "index": index} for index, sample in enumerate(load_split("train")[:24])]
DatasetCatalog.register("few_scans", lambda: SCANS)

OPTIONS = ["MODEL.DEVICE", "cpu", "DATASETS.TRAIN", ["few_scans"], "DATASETS.VAL", [], "DATASETS.TEST", []]
OPTIONS += ["SOLVER.MAX_ITER", 8, "SOLVER.IMS_PER_BATCH", 4, "SOLVER.CHECKPOINT_PERIOD", 3, "TEST.EVAL_PERIOD", 0]
OPTIONS += ["LOG.PERIOD", 2, "LOG.WRITERS", ["json"], "MODEL.WIDTH", 2, "SOLVER.WARMUP_ITERS", 1]
DEEPCLUSTER = {"NAME": "DeepClusterHook", "PERIOD": 3, "CLUSTERING": {"k": 6, "pca_dim": 2}}
DEEPCLUSTER |= {"REWEIGHT": True, "REWEIGHT_POW": 1.0}
INIT = {"NAME": "DeepClusterHook", "PERIOD": 1000, "CLUSTERING": {"k": 6, "pca_dim": None}, "INIT_MEMORY": True}
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


def start(name, folder, *options):
    cfg = config(name, folder, *options)
    seed_all_rng(cfg.SEED)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load()
    return trainer


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------- k-means and its measure

SIX_POINTS = torch.tensor([[0.0, 0.0], [0.0, 2.0], [10.0, 0.0], [10.0, 2.0], [20.0, 8.0], [20.0, 10.0]])


@pytest.mark.parametrize("seed", range(5))
def test_k_means_finds_clusters_that_lie_apart_and_the_means_of_their_members(seed):
    labels, centroids = kmeans(SIX_POINTS, 3, generator(seed), num_trials=5)

    assert centroids[labels].tolist() == [[0, 1], [0, 1], [10, 1], [10, 1], [20, 9], [20, 9]]
    assert labels.dtype == torch.int64


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([0, 0, 1, 1, 2, 2], [2, 2, 0, 0, 1, 1], 1.0),
        ([0, 0, 1, 1], [0, 1, 0, 1], 0.0),
        ([0, 0, 0, 0], [3, 3, 3, 3], 1.0),
        ([0, 0, 1, 1], [0, 0, 0, 0], 0.0),
        # entropies log 2 and 1.5 log 2, of which log 2 is shared
        ([0, 0, 1, 1], [0, 0, 1, 2], 0.8),
    ],
)
def test_mutual_information_is_normalized_by_the_mean_of_the_entropies(a, b, expected):
    a, b = torch.tensor(a), torch.tensor(b)
    assert normalized_mutual_info(a, b) == pytest.approx(expected, abs=1e-12)
    assert normalized_mutual_info(b, a) == pytest.approx(expected, abs=1e-12)


# ---------------------------------------------------------------------- features of the whole set


def test_whitened_features_have_as_many_components_of_equal_weight_in_rows_of_length_1():
    features = torch.randn(400, 3, generator=generator()) * torch.tensor([100.0, 1.0, 0.0]) + 7
    white = whiten(features, 2)

    assert list(white.shape) == [400, 2]
    assert white.square().sum(1).tolist() == pytest.approx([1.0] * 400)
    torch.testing.assert_close(white.T @ white / 400, torch.eye(2).double() / 2, atol=0.05, rtol=0)
    assert whiten(features, 3)[:, 0].abs().max() < 0.01


def test_a_cluster_counts_by_the_power_of_its_size():
    assert loss_weights(torch.tensor([1, 4, 16]), 0.5).tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    assert loss_weights(torch.tensor([1, 4, 16]), 1.0).tolist() == pytest.approx([16 / 21, 4 / 21, 1 / 21])
    # one without samples: 1e-10 ** -0.5 = 1e5 beside 1 and 1/2
    assert loss_weights(torch.tensor([1, 4, 0]), 0.5).tolist() == pytest.approx([1 / 1e5, 0.5 / 1e5, 1.0], rel=1e-4)


# ---------------------------------------------------------------------- DeepCluster


class BatchRecorder(HookBase):
    """What each iteration trains on."""

    def __init__(self):
        self.batches = []

    def after_backward(self):
        self.batches.append(self.trainer.batch)

    def column(self, key):
        return torch.stack([batch[key] for batch in self.batches])


class Recorder(BatchRecorder):
    """And what it leaves."""

    def __init__(self):
        super().__init__()
        self.states, self.heads, self.momenta = [], [], []

    def after_step(self):
        model, state = self.trainer.model, self.trainer.optimizer.state
        self.states.append(self.trainer.state_dict()["hooks"]["DeepClusterHook"])
        self.heads.append(model.head.weight.detach().clone())
        self.momenta.append(
            [any(value.any() for value in state[p].values()) for p in (model.head.weight, *model.backbone.parameters())]
        )


def record(folder, *options):
    trainer, recorder = start("deepcluster.yaml", folder, *options), Recorder()
    trainer.register_hooks([recorder])
    trainer.train()
    return recorder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return record(tmp_path_factory.mktemp("recorded"))


def test_the_data_are_clustered_before_the_first_iteration_and_after_every_third(recorded):
    assert [state["num_clusterings"] for state in recorded.states] == [1, 1, 2, 2, 2, 3, 3, 3]
    labels = [state["labels"] for state in recorded.states]
    changed = [not torch.equal(before, after) for before, after in itertools.pairwise(labels)]
    assert changed == [False, True, False, False, True, False, False]
    assert [sorted(of_one.unique().tolist()) for of_one in labels] == [[*range(6)]] * 8


def test_each_batch_has_the_labels_of_the_last_clustering(recorded):
    known = torch.stack([recorded.states[0]["labels"], *(state["labels"] for state in recorded.states[:-1])])
    assert torch.equal(recorded.column("label"), known.gather(1, recorded.column("index")))
    first = known[:1].expand_as(known)
    assert not torch.equal(recorded.column("label"), first.gather(1, recorded.column("index")))


def test_the_optimizer_forgets_the_old_head_and_nothing_else(recorded):
    for iter, (head, *backbone) in enumerate(recorded.momenta):
        assert head == (iter not in (2, 5))
        assert all(backbone)


# ---------------------------------------------------------------------- the memory of ODC


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
    filled = memory([60.0, -60.0, 90.0, 90.0], [0, 0, 1, 1], num_clusters=2, momentum=1.0, **options)
    torch.testing.assert_close(filled.centroids, torch.tensor([[0.5, 0.0], [0.0, 1.0]]))
    change_ratio = filled.update_samples_memory(torch.tensor([0, 3]), unit(30.0, 30.0))
    assert filled.label_bank.tolist() == [label, 0, 1, label]
    assert change_ratio.item() == 0.5


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


# ---------------------------------------------------------------------- ODC


# ---------------------------------------------------------------------- killed and resumed


# ---------------------------------------------------------------------- several ranks


def check_deep_cluster(rank, folder):
    trainer, recorder = start("deepcluster.yaml", f"{folder}/deepcluster"), BatchRecorder()
    trainer.register_hooks([recorder])
    trainer.train()
    labels = trainer.state_dict()["hooks"]["DeepClusterHook"]["labels"]
    return labels, trainer.model.module.head.weight.detach(), recorder.column("index"), recorder.column("label")


def check_odc(rank, folder):
    trainer, recorder = start("odc.yaml", f"{folder}/odc"), BatchRecorder()
    trainer.register_hooks([recorder])
    trainer.train()
    return *unwrap_model(trainer.model).memory_bank.buffers(), recorder.column("index")


@pytest.fixture(scope="module", params=SLOW)
def on_ranks(tmp_path_factory):
    return on_two_ranks([check_deep_cluster, check_odc], tmp_path_factory.mktemp("ranks"))


def test_two_ranks_have_the_same_labels_and_head_and_share_the_batches_of_one(on_ranks, recorded):
    (labels, head, *batches), (other_labels, other_head, *other_batches) = on_ranks["check_deep_cluster"]
    assert torch.equal(labels, other_labels)
    assert torch.equal(head, other_head)
    index, label = (torch.stack(parts, 2).flatten(1) for parts in zip(batches, other_batches, strict=True))
    assert torch.equal(index, recorded.column("index"))
    assert torch.equal(label[:3], recorded.column("label")[:3])  # later the weights differ, by batch norm


def test_two_ranks_have_the_same_memory_of_the_samples_of_both(on_ranks, tmp_path):
    *_, index_of_one = check_odc(0, tmp_path)
    (*memories, index), (*other_memories, other_index) = on_ranks["check_odc"]
    for memory, other in zip(memories, other_memories, strict=True):
        assert torch.equal(memory, other)
    assert torch.equal(torch.stack([index, other_index], 2).flatten(1), index_of_one)
