"""What the methods share, SimSiam, SwAV and DenseCL with their hooks; others are in test_selfsup_clusters.py."""

import copy
import itertools
import math
import re
from collections import Counter
from pathlib import Path

import numpy
import pytest
import torch
from torch.nn import functional as F

from projects.selfsup import FrozenFeatureEvaluator, compare, load_frozen, load_unlabeled
from projects.selfsup.data import EVALUATED, LABELLED, UNLABELLED
from projects.selfsup.densecl import DenseCL
from projects.selfsup.evaluation import linear_probe, nearest_neighbours
from projects.selfsup.simsiam import SimSiam, negative_cosine
from projects.selfsup.swav import SwAV, sinkhorn
from tests.two_ranks import on_two_ranks
from trainkit.config import ConfigError, get_cfg
from trainkit.data import DatasetCatalog
from trainkit.engine import SimpleTrainer
from trainkit.engine.hooks import CallbackHook, LRScheduler
from trainkit.utils.logger import close_logger
from trainkit_selfsup import DeepClusterHook, DenseCLHook, ODCHook, SimSiamHook, SwAVHook

FOLDER = Path(__file__).parents[2] / "projects" / "selfsup"


def few_frozen():
    """Three labelled scans per class, as many others, and 20 to evaluate."""
    samples, kept = load_frozen("val"), Counter()
    for sample in samples:
        key = sample["part"], sample["label"]
        kept[key] += 1
        if kept[key] <= (2 if sample["part"] == EVALUATED else 3):
            yield sample


DatasetCatalog.register("few_unlabeled", lambda: load_unlabeled()[:24])
DatasetCatalog.register("few_frozen", lambda: list(few_frozen()))

OPTIONS = [
    "DATASETS.TRAIN",
    ["few_unlabeled"],
    "DATASETS.VAL",
    ["few_frozen"],
    "DATASETS.TEST",
    ["few_frozen"],
]
OPTIONS += [
    "MODEL.DEVICE",
    "cpu",
    "MODEL.WIDTH",
    2,
    "SOLVER.MAX_ITER",
    6,
    "SOLVER.IMS_PER_BATCH",
    8,
]
OPTIONS += ["SOLVER.WARMUP_ITERS", 2, "SOLVER.CHECKPOINT_PERIOD", 2, "TEST.EVAL_PERIOD", 4]
OPTIONS += ["CHECKPOINT.BEST_METRIC", "frozen/knn", "CHECKPOINT.BEST_MODE", "max"]
OPTIONS += ["LOG.PERIOD", 2, "LOG.WRITERS", ["json"]]
SWAV = {
    "NAME": "SwAVHook",
    "BATCH_SIZE": 4,
    "FEAT_DIM": 4,
    "QUEUE_LENGTH": 16,
    "EPOCH_QUEUE_STARTS": 1,
}
SWAV["FROZEN_LAYERS_CFG"] = {"prototypes": "1ep"}
DENSECL = {"NAME": "DenseCLHook", "START_ITERS": 3, "MOMENTUM": 0.9}
SMALL = {
    "simsiam": ["MODEL.SIMSIAM.DIM", 8, "MODEL.SIMSIAM.HIDDEN_DIM", 4],
    "swav": ["MODEL.SWAV.DIM", 4, "MODEL.SWAV.NUM_PROTOTYPES", 6, "HOOKS", [SWAV]],
    "densecl": ["MODEL.DENSECL.DIM", 4, "MODEL.DENSECL.QUEUE_LENGTH", 12, "HOOKS", [DENSECL]],
}


def config(name, folder="", *options):
    cfg = get_cfg()
    cfg.merge_from_file(str(FOLDER / f"{name}.yaml"))
    cfg.merge_from_list([*OPTIONS, *SMALL[name], "OUTPUT_DIR", str(folder), *options])
    return cfg


def views(num=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(num, 1, 8, 8, generator=generator) for name in ("view1", "view2")}


def train(model, hooks, num_iters, look, optimizer=None):
    """What ``look()`` gives after the backward pass of each iteration; an epoch has six."""
    found = []
    loader = [views(seed=i) for i in range(6)]
    trainer = SimpleTrainer(model, loader, optimizer or torch.optim.SGD(model.parameters(), lr=0.1))
    spy = CallbackHook(after_backward=lambda trainer: found.append(look()))
    trainer.register_hooks([*hooks, spy])
    trainer.train(0, num_iters)
    return found


def process(evaluator, samples):
    """Each sample is (part, label, feature)."""
    parts, labels, features = zip(*samples, strict=True)
    evaluator.process(
        {"part": torch.tensor(parts), "label": torch.tensor(labels)}, torch.tensor(features)
    )


A, B = [2.0, 0.1], [0.1, 2.0]
SAMPLES = [
    (LABELLED, 0, A),
    (LABELLED, 1, B),
    *[(UNLABELLED, 1, A)] * 30,
    *[(UNLABELLED, 1, B)] * 30,
]
SAMPLES += [(EVALUATED, 0, A), (EVALUATED, 0, A), (EVALUATED, 1, B), (EVALUATED, 1, B)]
SCORES = {"frozen": {"probe": 100.0, "knn": 50.0, "nmi": pytest.approx(100)}}


def test_the_probe_sees_few_labels_and_the_neighbours_all():
    evaluator = FrozenFeatureEvaluator()
    process(evaluator, SAMPLES[:40])
    process(evaluator, SAMPLES[40:])
    # among the twenty nearest, at most one says 0
    assert evaluator.evaluate() == SCORES


def test_neighbours_found_part_by_part_are_those_of_all_at_once(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (60,), generator=generator)
    queries = torch.randn(33, 5, generator=generator, dtype=torch.float64)
    expected = []
    for query in queries:
        cosines = [float(query @ row / query.norm() / row.norm()) for row in features]
        votes = [0.0] * 3
        for place in sorted(range(60), key=cosines.__getitem__)[-20:]:
            votes[labels[place]] += math.exp(cosines[place] / 0.07)
        expected.append(votes.index(max(votes)))
    monkeypatch.setattr("trainkit_selfsup.clustering._CHUNK_ENTRIES", 256)
    assert nearest_neighbours(features, labels, queries).tolist() == expected


def test_features_that_are_not_finite_are_no_score():
    evaluator = FrozenFeatureEvaluator()
    process(evaluator, [(LABELLED, 0, [2.0, math.nan]), *SAMPLES[1:]])
    with pytest.raises(ValueError, match=r"must be finite, but 1 of .* the first is row 0"):
        evaluator.evaluate()


def test_statistics_of_one_sample_are_not_nan():
    model = SimSiam(width=2, dim=8, hidden_dim=4).eval()
    batch = {name: images[:1] for name, images in views().items()}
    assert model.losses(batch)["output_std"].item() == 0.0
    one = torch.ones(1, 3, dtype=torch.float64)
    found = linear_probe(one, torch.eye(3).double(), torch.tensor([0, 1, 2]), torch.eye(3).double())
    assert found.tolist() == [0, 1, 2]


def test_simsiam_compares_each_prediction_with_the_other_projection_which_gets_no_gradient():
    prediction, target = torch.rand(2, 2, requires_grad=True), torch.rand(2, 2, requires_grad=True)
    negative_cosine(prediction, target).backward()
    assert target.grad is None
    assert prediction.grad.any()
    model, batch = SimSiam(width=2, dim=8, hidden_dim=4), views()
    z = [model.projector(model.backbone(batch[name]).mean(dim=(2, 3))) for name in batch]
    p = [model.predictor(projection) for projection in z]
    expected = [-F.cosine_similarity(p[i], z[j]).mean().item() for i, j in ((0, 1), (1, 0))]
    losses = model.losses(batch)
    assert losses["loss_sim"].item() == pytest.approx(sum(expected) / 2)
    assert not losses["output_std"].requires_grad


@pytest.mark.parametrize(("flag", "fix"), [("fix_lr", True), ("fixed_lr", True), ("fix_lr", False)])
def test_the_rate_of_flagged_groups_stays_while_a_schedule_halves_the_others(flag, fix):
    model = SimSiam(width=2, dim=8, hidden_dim=4)
    groups = [
        {"params": [*model.backbone.parameters()]},
        {"params": [*model.predictor.parameters()], flag: True},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.4)
    halves = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda iter: 0.5**iter)
    hooks = [SimSiamHook(fix, 0.05), LRScheduler(optimizer, halves)]
    found = train(
        model, hooks, 4, lambda: [group["lr"] for group in optimizer.param_groups], optimizer
    )
    falling = [0.4, 0.2, 0.1, 0.05]
    assert [list(of_group) for of_group in zip(*found, strict=True)] == [
        falling,
        [0.05] * 4 if fix else falling,
    ]


def test_sinkhorn_is_that_of_the_paper():
    """In numpy, by the two vectors that scale prototypes and samples of one matrix."""
    scores = torch.rand(7, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    matrix = numpy.exp(scores.double().numpy() / 0.05)
    of_samples = numpy.ones(7)
    for _ in range(3):
        of_prototypes = 7 / 4 / (of_samples @ matrix)
        of_samples = 1 / (matrix @ of_prototypes)
    expected = torch.from_numpy(of_samples[:, None] * matrix * of_prototypes)
    assert torch.allclose(sinkhorn(scores).double(), expected, atol=1e-6)
    assert not torch.allclose(sinkhorn(scores, num_iters=1).double(), expected, atol=1e-2)


@pytest.mark.parametrize("queue", ["absent", "not full", "full"])
def test_swav_foretells_the_assignment_of_the_other_view_and_fills_its_queue(queue):
    torch.manual_seed(0)
    model, batch = SwAV(width=2, dim=4, num_prototypes=6), views(num=5)
    before = F.normalize(torch.randn(2, 12, 4), dim=2)
    before[:, 7 if queue == "not full" else 12 :] = 0
    model.head.loss.queue = None if queue == "absent" else before.clone()
    with torch.no_grad():
        z = [
            F.normalize(model.projector(model.backbone(batch[name]).mean(dim=(2, 3))))
            for name in batch
        ]
        prototypes = F.normalize(model.head.loss.prototypes.weight)
        rows = [torch.cat([z[i], before[i]]) if queue == "full" else z[i] for i in range(2)]
        q = [sinkhorn(rows[i] @ prototypes.T)[:5] for i in range(2)]
        log_p = [F.log_softmax(z[i] @ prototypes.T / 0.1, dim=1) for i in range(2)]
        expected = -((q[0] * log_p[1]).sum(dim=1).mean() + (q[1] * log_p[0]).sum(dim=1).mean()) / 2

    assert model.losses(batch)["loss_swap"].item() == pytest.approx(expected.item())
    assert model.head.loss.use_queue == (queue == "full")
    if queue != "absent":
        assert torch.allclose(model.head.loss.queue[:, :5], torch.stack(z))
        assert torch.equal(model.head.loss.queue[:, 5:], before[:, :7])


def test_the_hook_makes_the_queue_in_its_epoch_and_it_is_used_when_it_is_full():
    model = SwAV(width=2, dim=4, num_prototypes=6)
    loss = model.head.loss
    # 11 rows are rounded down to two batches of 4
    hook = SwAVHook(
        batch_size=4, epoch_queue_starts=1, crops_for_assign=[0, 1], feat_dim=4, queue_length=11
    )
    found = train(
        model, [hook], 12, lambda: (loss.queue is not None and loss.queue.clone(), loss.use_queue)
    )
    assert [used for _, used in found] == [False] * 8 + [True] * 4
    assert [queue is not False for queue, _ in found] == [False] * 6 + [True] * 6
    assert not found[6][0][:, 4:].any()
    for (before, _), (after, _) in itertools.pairwise(found[6:]):
        assert torch.equal(after[:, 4:], before[:, :4])


@pytest.mark.parametrize("fused", [False, True])
def test_each_frozen_layer_starts_at_its_own_iteration_and_neither_decay_nor_momentum_moves_it(
    fused,
):
    model = SwAV(width=2, dim=4, num_prototypes=6)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, fused=fused
    )
    layers = [model.head.loss.prototypes.weight, next(model.projector.parameters())]
    hook = SwAVHook(4, frozen_layers_cfg={"prototypes": 3, "projector": 5})
    found = train(model, [hook], 8, lambda: [layer.clone() for layer in layers], optimizer)

    for layer, first in ((0, 3), (1, 5)):
        changed = [
            not torch.equal(old[layer], new[layer]) for old, new in itertools.pairwise(found)
        ]
        assert changed == [iter >= first for iter in range(7)]


def test_densecl_weighs_its_two_losses_from_an_iteration_on_and_remembers_the_keys():
    torch.manual_seed(0)
    model = DenseCL(width=2, dim=4, queue_length=12, loss_lambda=0.3)
    begin = copy.deepcopy(model.state_dict())
    losses = {}
    for weight in (0.3, 0.0):
        model.load_state_dict(begin)
        model.loss_lambda = weight
        losses[weight] = {name: loss.item() for name, loss in model.losses(views(num=5)).items()}

    assert losses[0.0]["loss_dense"] == 0.0 < losses[0.3]["loss_dense"]
    assert losses[0.0]["loss_single"] * 0.7 == pytest.approx(losses[0.3]["loss_single"])
    with torch.no_grad():
        single, dense, _ = model.key_encoder(views(num=5)["view2"])
    assert torch.allclose(model.queue, torch.cat([single, begin["queue"][:7]]))
    assert torch.allclose(model.dense_queue[:5], F.normalize(dense.mean(dim=2)))

    model.loss_lambda = 0.3
    assert (
        train(model, [DenseCLHook(start_iters=3)], 5, lambda: model.loss_lambda)
        == [0.0] * 3 + [0.3] * 2
    )
    assert model.loss_lambda == 0.3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DenseCLHook(), "DenseCLHook needs loss_lambda of the model, .*Linear"),
        (
            lambda: SimSiamHook(True, 0.1),
            "SimSiamHook needs a parameter group with fix_lr or fixed_lr",
        ),
        (lambda: SwAVHook(4, queue_length=8), "SwAVHook needs head.loss.queue of the model"),
        (
            lambda: SwAVHook(4, frozen_layers_cfg={"x_": 3}),
            "no parameter of Linear has 'x_' in its name",
        ),
        (lambda: DeepClusterHook({"k": 2}), "DeepClusterHook needs extract_feat of the model"),
        (lambda: ODCHook(2, 3, 4), "ODCHook needs memory_bank.label_bank of the model"),
    ],
)
def test_a_model_that_lacks_a_name_is_refused_before_training(make, message):
    with pytest.raises(ConfigError, match=message):
        train(torch.nn.Linear(1, 1), [make()], 1, lambda: None)


@pytest.mark.slow
def test_the_comparison_prints_one_row_per_method_with_the_value_of_each_seed(tmp_path, capsys):
    options = ["--opts", *map(str, [*OPTIONS, *SMALL["simsiam"]])]
    arguments = [
        "--methods",
        "simsiam",
        "--seeds",
        "0",
        "1",
        "--output-dir",
        str(tmp_path),
        *options,
    ]
    tables = []
    for _ in range(2):  # the second time the runs are there
        compare.main(arguments)
        close_logger()
        tables.append(capsys.readouterr().out.splitlines()[-5:])
    assert tables[0] == tables[1]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables[0]]
    assert cells[0] == ["", "probe, %", "knn, %", "nmi, %"]
    assert [row[0] for row in cells[2:]] == [
        "random backbone",
        "the same, precise batch norm",
        "simsiam",
    ]
    for cell in (cell for row in cells[2:] for cell in row[1:]):
        mean, *by_seed = map(float, re.findall(r"[\d.]+", cell))
        assert mean == pytest.approx(sum(by_seed) / 2, abs=0.11)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["simsiam_0", "simsiam_1"]
    assert list(tmp_path.glob("*/previous_*")) == []


def assigned_in_parts(rank, folder):
    scores = torch.rand(6, 3, generator=torch.Generator().manual_seed(0))
    return sinkhorn(scores[4:] if rank else scores[:4]).tolist()


def evaluated_in_parts(rank, folder):
    evaluator = FrozenFeatureEvaluator()
    process(evaluator, SAMPLES[40:] if rank else SAMPLES[:40])
    return evaluator.evaluate()


@pytest.mark.slow
def test_two_ranks_assign_their_samples_together_and_evaluate_as_one(tmp_path):
    found = on_two_ranks([assigned_in_parts, evaluated_in_parts], tmp_path)
    scores = torch.rand(6, 3, generator=torch.Generator().manual_seed(0))
    by_rank = found["assigned_in_parts"]
    assert torch.allclose(torch.tensor(by_rank[0] + by_rank[1]), sinkhorn(scores))
    assert not torch.allclose(torch.tensor(by_rank[0]), sinkhorn(scores[:4]))
    assert found["evaluated_in_parts"] == [SCORES, {}]
