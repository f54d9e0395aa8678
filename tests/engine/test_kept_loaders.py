"""The workers of the periodic evaluation."""

import multiprocessing

import pytest
from torch.utils.data import default_collate

from tests.engine.job import tiny_cfg
from trainkit.data import DatasetCatalog
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import CallbackHook

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def workers():
    return {process.pid for process in multiprocessing.active_children()}


def evaluate(tmp_path, *options, trainer_class=DefaultTrainer, num_workers=2):
    """The workers that are there at each evaluation, by which it was: 2, 4 and 6 iterations, the last at the end."""
    options = ("TEST.EVAL_PERIOD", 2, "SOLVER.MAX_ITER", 6, "DATALOADER.NUM_WORKERS", 0, *options)
    cfg = tiny_cfg(tmp_path, *options)
    trainer = trainer_class(cfg)
    trainer.cfg.defrost()
    trainer.cfg.DATALOADER.NUM_WORKERS = num_workers  # of what is evaluated only
    found, others = [], workers()  # of loaders that are not collected yet
    note = CallbackHook(after_eval=lambda trainer, phase, name, results: found.append(workers() - others))
    trainer.register_hooks([note])
    trainer.train()
    return found


def test_an_evaluation_goes_on_with_the_workers_of_the_last_one_and_a_run_ends_them(tmp_path):
    found = evaluate(tmp_path)
    assert found == [found[0]] * 3
    assert len(found[0]) == 2
    assert not workers() & found[0]


def test_workers_are_started_anew_for_each_evaluation_where_data_change(tmp_path):
    found = evaluate(tmp_path, "TEST.PERSISTENT_WORKERS", False)
    assert not found[0] & found[1]


def test_a_loader_of_the_users_is_built_for_each_evaluation(tmp_path):
    calls = []

    class Own(DefaultTrainer):
        @classmethod
        def build_test_loader(cls, cfg, dataset_name):
            calls.append(dataset_name)
            return (default_collate([sample]) for sample in DatasetCatalog.get(dataset_name))  # can be iterated once

    evaluate(tmp_path, trainer_class=Own, num_workers=0)
    assert calls == ["tiny_test"] * 3
