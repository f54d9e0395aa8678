"""What detectron2's users reach into: the names that their code needs beside those that are documented."""

import itertools
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from fvcore.common.param_scheduler import ConstantParamScheduler
from torch.optim import lr_scheduler

from tests.engine.tiny import Weight, sgd
from trainkit import solver
from trainkit.config import CfgNode, get_cfg, global_cfg, set_global_cfg
from trainkit.data import DatasetCatalog, MetadataCatalog, build_test_loader, build_train_loader
from trainkit.data.build import trivial_batch_collator
from trainkit.data.common import AspectRatioGroupedDataset, ToIterableDataset
from trainkit.data.samplers import InferenceSampler, TrainingSampler
from trainkit.engine import SimpleTrainer, hooks
from trainkit.solver.lr_scheduler import LRScheduler, _get_warmup_factor_at_iter
from trainkit.utils.memory import retry_if_cuda_oom
from trainkit.utils.serialize import PicklableWrapper


class WarmupPolyLR(LRScheduler):
    """DeepLab's schedule, as many projects have it: on the parts of detectron2's first schedules."""

    def __init__(self, optimizer, max_iters, warmup_factor, warmup_iters, warmup_method):
        self.max_iters, self.warmup = max_iters, (warmup_iters, warmup_factor)
        self.warmup_method = warmup_method
        super().__init__(optimizer)

    def get_lr(self):
        factor = _get_warmup_factor_at_iter(self.warmup_method, self.last_epoch, *self.warmup)
        left = 1.0 - self.last_epoch / self.max_iters
        return [base_lr * factor * left**0.9 for base_lr in self.base_lrs]


def rates(make, num=6):
    """The learning rates of the first iterations over a base of 1."""
    optimizer = sgd(Weight(), lr=1.0)
    scheduler, seen = make(optimizer), []
    for _ in range(num):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_the_first_schedules_multiply_their_warm_up():
    for method, second in (("linear", 0.75), ("constant", 0.5)):
        found = rates(
            lambda optimizer, method=method: solver.WarmupMultiStepLR(
                optimizer, [3, 5], 0.1, 0.5, 2, method
            )
        )
        assert found == pytest.approx([0.5, second, 1.0, 0.1, 0.1, 0.01])
    found = rates(lambda optimizer: WarmupPolyLR(optimizer, 10, 0.1, 2, "linear"), 3)
    assert found == pytest.approx([0.1, 0.55 * 0.9**0.9, 0.8**0.9])


def test_hooks_are_used_and_subclassed_as_in_detectron2(tmp_path):
    class Twice(hooks.EvalHook):
        def _do_eval(self):
            self.trainer.storage.put_scalar("twice", 2 * self._func(), smoothing_hint=False)

    model = Weight()
    optimizer = sgd(model)
    trainer = SimpleTrainer(model, [torch.tensor(1.0)], optimizer)
    trainer.scheduler = lr_scheduler.StepLR(optimizer, 3)
    of_trainer, given = (
        hooks.LRScheduler(),
        hooks.LRScheduler(optimizer, ConstantParamScheduler(1.0)),
    )
    profiler = hooks.AutogradProfiler(
        lambda trainer: trainer.iter in (1, 2), tmp_path, use_cuda=False
    )
    trainer.register_hooks([of_trainer, Twice(2, lambda: 21), profiler])
    trainer.train(0, 4)

    assert of_trainer.scheduler is trainer.scheduler
    assert isinstance(given.scheduler, ConstantParamScheduler)
    assert hooks.LRScheduler.get_best_param_group_id(optimizer) == 0
    assert trainer.storage.history("twice").values() == [(42.0, 1), (42.0, 4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "trace_iter0000001.json",
        "trace_iter0000002.json",
    ]


@pytest.mark.usefixtures("catalogs")
def test_the_catalogs_are_dicts():
    DatasetCatalog.clear()
    DatasetCatalog["a"] = lambda: [1]
    DatasetCatalog.register("b", lambda: [2])
    assert DatasetCatalog.list() == ["a", "b"]
    assert {name: make() for name, make in DatasetCatalog.items()} == {"a": [1], "b": [2]}
    assert DatasetCatalog["b"]() == DatasetCatalog.get("b") == [2]
    assert DatasetCatalog.pop("c", None) is None
    del DatasetCatalog["a"]
    with pytest.raises(KeyError, match="DatasetCatalog has no 'a'"):
        DatasetCatalog["a"]

    metadata = MetadataCatalog.get("b").set(classes=["x"])
    assert MetadataCatalog["b"] is metadata
    assert MetadataCatalog.pop("b") is metadata


def test_samples_of_a_shape_come_together_and_the_rest_waits():
    sizes = [(2, 1), (1, 2), (3, 1), (1, 1), (5, 1)]
    dataset = AspectRatioGroupedDataset([{"width": w, "height": h} for w, h in sizes], 2)

    def drawn():
        return [[(sample["width"], sample["height"]) for sample in batch] for batch in dataset]

    assert drawn() == [[(2, 1), (3, 1)], [(1, 2), (1, 1)]]
    assert drawn() == [[(5, 1), (2, 1)], [(1, 2), (1, 1)], [(3, 1), (5, 1)]]


@pytest.mark.usefixtures("catalogs")
@pytest.mark.parametrize("iterable", [False, True])
def test_loaders_are_built_from_a_dataset_and_a_mapper(iterable):
    """As the calls of detectron2's configs in Python, and those with a cfg that add a mapper."""
    samples = [*range(6)]
    train, test = samples, samples
    if iterable:
        train = ToIterableDataset(samples, TrainingSampler(6, seed=1))
        test = ToIterableDataset(samples, InferenceSampler(6))

    def first_batch(*args, **kwargs):
        return sorted(next(iter(build_train_loader(*args, **kwargs))))

    found = first_batch(dataset=train, mapper=lambda x: 10 * x, total_batch_size=6, num_workers=0)
    assert found == [0, 10, 20, 30, 40, 50]
    batches = [
        *build_test_loader(
            test, mapper=lambda x: -x, batch_size=4, collate_fn=trivial_batch_collator
        )
    ]
    assert batches == [[0, -1, -2, -3], [-4, -5]]
    assert [batch.tolist() for batch in build_test_loader(test)] == [[x] for x in samples]

    cfg = get_cfg()
    cfg.merge_from_list(
        ["SOLVER.IMS_PER_BATCH", 6, "DATALOADER.NUM_WORKERS", 0, "DATALOADER.COLLATE", "list"]
    )
    assert first_batch(cfg, train, mapper=lambda x: x + 1) == [1, 2, 3, 4, 5, 6]
    DatasetCatalog.register("clients_test", lambda: test)
    loader = build_test_loader(
        cfg, "clients_test", mapper=lambda x: x + 1, batch_size=6, collate_fn=sum
    )
    assert [*loader] == [21]
    if not iterable:
        assert first_batch(
            cfg, train, sampler=TrainingSampler(6, shuffle=False), total_batch_size=2
        ) == [0, 1]
        cfg.DATASETS.TRAIN = ("clients_test",)
        assert first_batch(cfg, lambda x: x + 1) == [1, 2, 3, 4, 5, 6]


def test_the_sampler_of_rare_categories_reads_detectron2s_dicts_by_a_config():
    cfg = get_cfg()
    cfg.merge_from_list(["DATALOADER.SAMPLER_TRAIN", "RepeatFactorTrainingSampler"])
    cfg.merge_from_list(
        ["DATALOADER.REPEAT_THRESHOLD", 1.0, "DATALOADER.REPEAT_SQRT", False, "SEED", 1]
    )
    cfg.merge_from_list(
        ["SOLVER.IMS_PER_BATCH", 1, "DATALOADER.NUM_WORKERS", 0, "DATALOADER.COLLATE", "list"]
    )
    samples = [{"id": i, "annotations": [{"category_id": int(i == 0)}] * (i < 4)} for i in range(8)]
    counts = Counter(
        batch[0]["id"] for batch in itertools.islice(build_train_loader(cfg, samples), 400)
    )
    # category 1 is in 1 of 8 samples, category 0 in 3 of 8
    shares = [8, 8 / 3, 8 / 3, 8 / 3, 1, 1, 1, 1]
    assert [counts[i] / 400 for i in range(8)] == pytest.approx(
        [share / 20 for share in shares], abs=0.03
    )


OFFSET = 100


def test_functions_that_no_module_holds_are_pickled_by_their_code():
    def power(base, times=2):
        return 1 if times == 0 else base * power(base, times - 1)

    def function(x, *, add=1):
        return sum(OFFSET + 3 * power(y) + add + int(np.sign(y)) for y in [x])

    assert pickle.loads(pickle.dumps(PicklableWrapper(function)))(2, add=5) == 118
    held = pickle.loads(pickle.dumps(PicklableWrapper({"functions": [function, rates]})))
    assert held["functions"][0](2) == 114
    assert held["functions"][1] == rates


def test_a_call_without_enough_memory_is_made_again_and_then_on_the_cpu(caplog):
    calls = []

    class OnGpu:
        device = torch.device("cuda")

        def to(self, device):
            return f"on {device}"

    @retry_if_cuda_oom
    def fails_twice(*args, **kwargs):
        calls.append((args, kwargs))
        if len(calls) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return args, kwargs

    first, second = OnGpu(), OnGpu()
    assert fails_twice(first, 1, key=second) == (("on cpu", 1), {"key": "on cpu"})
    assert "it runs on the CPU" in caplog.text
    assert calls[0] == calls[1] == ((first, 1), {"key": second})
    with pytest.raises(ZeroDivisionError):
        retry_if_cuda_oom(lambda: 1 / 0)()


def test_the_global_config_is_the_one_that_was_set_last():
    set_global_cfg(CfgNode({"SOLVER": {"BASE_LR": 0.5}}))
    assert global_cfg.SOLVER.BASE_LR == 0.5
    global_cfg.clear()
