"""The hooks of `trainkit_selfsup` on models that are not the project's: written as MMSelfSup's, with its names."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.engine.job import tiny_cfg
from trainkit.config import ConfigError
from trainkit.data import DatasetCatalog
from trainkit.engine import DefaultTrainer, HookBase, SimpleTrainer
from trainkit.engine.hooks import LRScheduler
from trainkit.modeling import MODEL_REGISTRY
from trainkit.utils.env import seed_all_rng
from trainkit_selfsup import DenseCLHook, ODCMemory, SimSiamHook, SwAVHook

NUM, DIM, K = 24, 3, 4


def samples(num=NUM):
    x = torch.randn(num, 5, generator=torch.Generator().manual_seed(0))
    return [{"x": x[i], "sample_idx": i} for i in range(num)]


DatasetCatalog.register("foreign_train", samples)


class Backbone(nn.Module):
    """Gives a tuple of maps, as backbones of MMSelfSup do."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Linear(5, DIM * 4)

    def forward(self, x):
        first = self.conv(x).reshape(-1, DIM, 2, 2)
        return first - 1, first.tanh()


class Neck(nn.Module):
    def forward(self, maps):
        return [maps[-1].mean((2, 3))]


class Algorithm(nn.Module):
    """``train_step`` of MMEngine calls ``loss``; trainkit calls the model."""

    def __init__(self, cfg=None):
        super().__init__()
        self.backbone, self.neck = Backbone(), Neck()

    def extract_feat(self, batch):
        return self.backbone(batch["x"])

    def forward(self, batch):
        return self.loss(batch)


class CrossEntropy(nn.Module):
    class_weight = None

    def forward(self, scores, labels):
        return F.cross_entropy(scores, labels, weight=self.class_weight)


class ClsHead(nn.Module):
    """As a module of MMEngine: it initializes itself once, unless ``_is_init`` is set back."""

    def __init__(self):
        super().__init__()
        self.fc_cls, self.loss = nn.Linear(DIM, K), CrossEntropy()
        self._is_init = True
        self.num_inits = 0

    def init_weights(self):
        if not self._is_init:
            self.num_inits += 1
            nn.init.normal_(self.fc_cls.weight, std=0.5)
            nn.init.zeros_(self.fc_cls.bias)
            self._is_init = True

    def forward(self, feats, labels):
        return self.loss(self.fc_cls(feats[-1]), labels)


@MODEL_REGISTRY.register()
class ForeignDenseCL(Algorithm):
    def __init__(self, cfg=None):
        super().__init__()
        self.loss_lambda = 0.3

    def loss(self, batch):
        maps = self.extract_feat(batch)[-1]
        single, dense = maps.mean().square(), maps.square().mean()
        return {"loss_single": single * (1 - self.loss_lambda), "loss_dense": dense * self.loss_lambda}


@MODEL_REGISTRY.register()
class ForeignSimSiam(Algorithm):
    def __init__(self, cfg=None):
        super().__init__()
        self.head = nn.Module()
        self.head.predictor = nn.Linear(DIM, DIM)

    def loss(self, batch):
        z = self.neck(self.extract_feat(batch))[0]
        return {"loss": -F.cosine_similarity(self.head.predictor(z), z.detach()).mean()}


class ForeignSwAVLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.prototypes = nn.Linear(DIM, 2, bias=False)
        self.use_queue, self.queue = False, None

    def forward(self, embedding):
        size, embeddings = len(embedding), (embedding.detach(), -embedding.detach())
        bias = 0.0
        if self.queue is not None:
            if self.use_queue or not torch.all(self.queue[0, -1] == 0):
                self.use_queue = True
                with torch.no_grad():
                    bias = self.prototypes(self.queue[0]).mean()
            for i, rows in enumerate(embeddings):
                self.queue[i, size:] = self.queue[i, :-size].clone()
                self.queue[i, :size] = rows
        return (self.prototypes(embedding) - bias).square().mean()


@MODEL_REGISTRY.register()
class ForeignSwAV(Algorithm):
    def __init__(self, cfg=None):
        super().__init__()
        self.head = nn.Module()
        self.head.loss = ForeignSwAVLoss()
        self.last = None

    def loss(self, batch):
        self.last = self.neck(self.extract_feat(batch))[0]
        return {"loss": self.head.loss(self.last)}


@MODEL_REGISTRY.register()
class ForeignDeepCluster(Algorithm):
    def __init__(self, cfg=None):
        super().__init__()
        self.head = ClsHead()
        self.register_buffer("loss_weight", torch.ones(K) / K)

    def loss(self, batch):
        self.head.loss.class_weight = self.loss_weight
        return {"loss": self.head(self.neck(self.extract_feat(batch)), batch["clustering_label"])}


@MODEL_REGISTRY.register()
class ForeignODC(ForeignDeepCluster):
    def __init__(self, cfg=None):
        super().__init__()
        self.memory_bank = ODCMemory(length=NUM, feat_dim=DIM, momentum=0.5, num_classes=K, min_cluster=3)

    def loss(self, batch):
        feature = self.neck(self.extract_feat(batch))
        losses = {"loss": self.head(feature, self.memory_bank.label_bank[batch["sample_idx"]])}
        change_ratio = self.memory_bank.update_samples_memory(batch["sample_idx"], feature[0].detach())
        return {**losses, "change_ratio": change_ratio}


CLUSTERING = {"type": "Kmeans", "k": K, "pca_dim": 2}
DEEP = {"NAME": "DeepClusterHook", "CLUSTERING": CLUSTERING, "LABEL_KEY": "clustering_label", "REWEIGHT": True}
ENTRIES = {
    "DenseCL": [{"NAME": "DenseCLHook", "START_ITERS": 5}],
    "SimSiam": [{"NAME": "SimSiamHook", "FIX_PRED_LR": True, "LR": 0.05}],
    "SwAV": [
        {
            "NAME": "SwAVHook",
            "BATCH_SIZE": 4,
            "EPOCH_QUEUE_STARTS": 0,
            "CROPS_FOR_ASSIGN": [0, 1],
            "FEAT_DIM": DIM,
            "QUEUE_LENGTH": 13,
            "INTERVAL": 1,
            "FROZEN_LAYERS_CFG": {"prototypes": 5},
        }
    ],
    "DeepCluster": [{**DEEP, "UNIF_SAMPLING": True, "REWEIGHT_POW": 0.5, "INITIAL": True, "PERIOD": 4}],
    "ODC": [
        {**DEEP, "INIT_MEMORY": True, "INTERVAL": 9999},
        {
            "NAME": "ODCHook",
            "CENTROIDS_UPDATE_INTERVAL": 2,
            "DEAL_WITH_SMALL_CLUSTERS_INTERVAL": 3,
            "EVALUATE_INTERVAL": 4,
            "REWEIGHT": True,
            "REWEIGHT_POW": 0.5,
        },
    ],
}


def config(folder, method, hooks=None, *options):
    """12 iterations of 4 samples, six per epoch, saved after every third."""
    predictor = [{"KEY": "predictor", "FIXED_LR": True}]
    return tiny_cfg(
        folder,
        *("MODEL.NAME", f"Foreign{method}", "DATASETS.TRAIN", ("foreign_train",), "DATASETS.TEST", ()),
        *("INPUT.TRAIN_TRANSFORM", "", "INPUT.TEST_TRANSFORM", "", "TEST.EVAL_PERIOD", 0, "SOLVER.STEPS", (4,)),
        *("SOLVER.MAX_ITER", 12, "SOLVER.IMS_PER_BATCH", 4, "SOLVER.CHECKPOINT_PERIOD", 3, "SOLVER.MOMENTUM", 0.9),
        *("SOLVER.WEIGHT_DECAY", 0.1, "SOLVER.PARAM_GROUPS.CUSTOM_KEYS", predictor if method == "SimSiam" else []),
        *("HOOKS", ENTRIES[method] if hooks is None else hooks),
        *options,
    )


def run(folder, method, hooks=None, *options, spies=()):
    cfg = config(folder, method, hooks, *options)
    seed_all_rng(cfg.SEED)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load()
    trainer.register_hooks(spies)
    trainer.train()
    return trainer


def look(function, point="after_backward"):
    """A hook whose ``found`` lists what ``function(trainer)`` gives in each iteration."""
    spy = type("Look", (HookBase,), {point: lambda self: self.found.append(function(self.trainer))})()
    spy.found = []
    return spy


def simple(model, hooks, data=None, optimizer=None, num_iters=6):
    """A trainer without a config."""
    loader = DataLoader(samples(), batch_size=4) if data is None else data
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = SimpleTrainer(model, loader, optimizer)
    trainer.register_hooks(hooks)
    trainer.train(0, num_iters)
    return trainer


# ---------------------------------------------------------------------- all five


class Without(nn.Module):
    """A model with none of the names."""

    def __init__(self, cfg=None):
        super().__init__()
        self.fc = nn.Linear(5, 1)

    def forward(self, batch):
        return {"loss": self.fc(batch["x"]).mean()}


MODEL_REGISTRY.register(Without)


@pytest.mark.parametrize(
    ("method", "index", "message"),
    [
        ("DenseCL", 0, "DenseCLHook needs a number loss_lambda of the model, but Without has none"),
        ("SimSiam", 0, "SimSiamHook needs a parameter group with fix_lr or fixed_lr, but the optimizer has none"),
        ("SwAV", 0, "SwAVHook needs an attribute head.loss.queue of the model, but Without has none"),
        ("DeepCluster", 0, "DeepClusterHook needs a method extract_feat of the model, but Without has none"),
        ("ODC", 1, "ODCHook needs a tensor memory_bank.label_bank of the model, but Without has none"),
    ],
)
def test_a_model_that_lacks_a_name_is_refused_before_training(tmp_path, method, index, message):
    entry = ENTRIES[method][index]
    options = ["MODEL.NAME", "Without", "SOLVER.PARAM_GROUPS.CUSTOM_KEYS", []]
    trainer = DefaultTrainer(config(tmp_path, method, [entry], *options))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(ConfigError, match=message):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


# ---------------------------------------------------------------------- DenseCL


def test_the_dense_loss_of_a_foreign_model_starts_at_its_iteration_and_lambda_is_put_back():
    model = ForeignDenseCL()
    spy = look(lambda trainer: (trainer.model.loss_lambda, *trainer.losses.values()))
    simple(model, [DenseCLHook(start_iters=3), spy])

    assert [found[0] for found in spy.found] == [0.0] * 3 + [0.3] * 3
    assert [float(dense) > 0 for _, _, dense in spy.found] == [False] * 3 + [True] * 3
    assert model.loss_lambda == 0.3


# ---------------------------------------------------------------------- SimSiam


def rates(trainer):
    return [group["lr"] for group in trainer.optimizer.param_groups]


@pytest.mark.parametrize("flag", ["fix_lr", "fixed_lr"])
@pytest.mark.parametrize(("fix", "expected"), [(True, [0.05] * 4), (False, [0.4, 0.2, 0.1, 0.05])])
def test_the_rate_of_flagged_groups_stays_while_a_schedule_halves_the_others(flag, fix, expected):
    model = ForeignSimSiam()
    groups = [{"params": [*model.backbone.parameters()]}, {"params": [*model.head.parameters()], flag: True}]
    optimizer = torch.optim.SGD(groups, lr=0.4)
    halves = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda iter: 0.5**iter)
    spy = look(rates)
    simple(model, [SimSiamHook(fix, 0.05), LRScheduler(optimizer, halves), spy], optimizer=optimizer, num_iters=4)

    assert [of_rest for of_rest, _ in spy.found] == [0.4, 0.2, 0.1, 0.05]
    assert [of_predictor for _, of_predictor in spy.found] == expected


# ---------------------------------------------------------------------- SwAV


def test_the_queue_holds_the_last_embeddings_newest_first_from_its_epoch_on():
    model, embeddings, queues, used = ForeignSwAV(), [], [], []

    def record(trainer):
        embeddings.append(model.last.detach().clone())
        queues.append(None if model.head.loss.queue is None else model.head.loss.queue.clone())
        used.append(model.head.loss.use_queue)

    hook = SwAVHook(batch_size=4, epoch_queue_starts=1, crops_for_assign=[0, 1], feat_dim=DIM, queue_length=11)
    simple(model, [hook, look(record)], num_iters=12)

    # six iterations per epoch; 11 rows are rounded down to two batches of 4
    assert [queue is None for queue in queues] == [True] * 6 + [False] * 6
    zeros = torch.zeros(4, DIM)
    assert torch.equal(queues[6][0], torch.cat([embeddings[6], zeros]))
    for iter in range(7, 12):
        rows = torch.cat([embeddings[iter], embeddings[iter - 1]])
        assert torch.equal(queues[iter], torch.stack([rows, -rows]))
    assert used == [False] * 8 + [True] * 4  # full after two batches


@pytest.mark.parametrize("fused", [False, True])
def test_each_frozen_layer_starts_at_its_own_iteration_and_neither_decay_nor_momentum_moves_it(fused):
    model = ForeignSwAV()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, fused=fused)
    spy = look(lambda trainer: [model.head.loss.prototypes.weight.clone(), model.backbone.conv.bias.clone()])
    frozen = {"prototypes": 3, "conv.bias": 5}
    simple(model, [SwAVHook(4, frozen_layers_cfg=frozen), spy], optimizer=optimizer, num_iters=8)

    pairs = [*itertools.pairwise(spy.found)]
    for layer, first in ((0, 3), (1, 5)):
        changed = [not torch.equal(old[layer], new[layer]) for old, new in pairs]
        assert changed == [iter >= first for iter in range(7)]
    with pytest.raises(ConfigError, match="no parameter of ForeignSwAV has 'prototype_' in its name"):
        simple(model, [SwAVHook(4, frozen_layers_cfg={"prototype_": 3})])


# ---------------------------------------------------------------------- DeepCluster


def cluster(trainer):
    state = trainer.state_dict()["hooks"]["DeepClusterHook"]
    return state["num_clusterings"], state["labels"], trainer.model.head.num_inits


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"INTERVAL": 1}, [1] * 5 + [2] * 6 + [3]),  # six iterations per epoch
        ({"PERIOD": "1ep"}, [1] * 5 + [2] * 6 + [3]),
        ({"PERIOD": 5}, [1] * 4 + [2] * 5 + [3] * 3),
        ({"INTERVAL": 9999}, [1] * 12),
    ],
)
def test_a_foreign_model_is_clustered_at_first_and_at_each_interval_and_its_head_starts_again(
    tmp_path, options, expected
):
    spy = look(cluster, "after_step")
    run(tmp_path, "DeepCluster", [{**DEEP, **options}], spies=[spy])
    assert [(found[0], found[2]) for found in spy.found] == [(count, count) for count in expected]


# ---------------------------------------------------------------------- ODC


def test_a_foreign_odc_follows_the_formulas_step_by_step(tmp_path):
    """Each iteration again by hand: mix, normalize, largest inner product, centroids every second iteration."""
    steps = []

    def before(trainer):
        bank = trainer.model.memory_bank
        steps.append([bank.feature_bank.clone(), bank.label_bank.clone(), bank.centroids.clone()])

    def after(trainer):
        bank, index = trainer.model.memory_bank, trainer.batch["sample_idx"]
        with torch.no_grad():
            feature = trainer.model.neck(trainer.model.extract_feat(trainer.batch))[0]
        old, labels, centroids = steps[-1]
        mixed = 0.5 * old[index] + 0.5 * feature / feature.norm(dim=1, keepdim=True)
        mixed = mixed / mixed.norm(dim=1, keepdim=True)
        expected = (mixed @ centroids.T).argmax(1)
        torch.testing.assert_close(bank.feature_bank[index], mixed)
        assert torch.equal(bank.label_bank[index], expected)
        ratio = (expected != labels[index]).float().mean()
        assert trainer.losses["change_ratio"] == ratio
        return float(ratio)

    init, keep = ENTRIES["ODC"]
    keep = {**keep, "DEAL_WITH_SMALL_CLUSTERS_INTERVAL": 100}
    spies = [look(before, "before_step"), look(after)]
    trainer = run(tmp_path, "ODC", [init, keep], spies=spies)

    assert any(spies[1].found)
    changed = [not torch.equal(old[2], new[2]) for old, new in itertools.pairwise(steps)]
    assert changed == [iter % 2 == 1 for iter in range(11)]
    bank = trainer.model.memory_bank
    for cluster in bank.label_bank.unique().tolist():  # iteration 11 was the last update
        torch.testing.assert_close(bank.centroids[cluster], bank.feature_bank[bank.label_bank == cluster].mean(0))
