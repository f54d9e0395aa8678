import json
import math
import sysconfig
from pathlib import Path

import pytest
import torch

from projects.charlm import (
    GPT,
    UNKNOWN,
    VOCABULARY,
    WINDOW,
    TextWindows,
    corpus,
    decode,
    encode,
    sample,
)
from projects.charlm.corpus import read_corpus, split_of
from trainkit.config import ConfigError, get_cfg
from trainkit.data import DatasetCatalog
from trainkit.engine import DefaultPredictor, DefaultTrainer
from trainkit.modeling import build_model
from trainkit.utils.env import seed_all_rng

CONFIG = Path(__file__).parents[2] / "projects" / "charlm" / "config.yaml"

# real text, too, which never changes
DatasetCatalog.register(
    "few_windows", lambda: TextWindows(encode((CONFIG.parents[2] / "LICENSE").read_text()), 20)
)


def config(*options):
    cfg = get_cfg()
    cfg.merge_from_file(str(CONFIG))
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", *options])
    return cfg


def write(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_a_character_is_a_token_and_all_others_are_the_unknown_one():
    text = "def f(x):\n    return x ** 2  # ~!"
    assert decode(encode(text)) == text
    assert encode("\n ~").tolist() == [1, 2, 96]
    assert encode("ä\t\x7f\r🙂").tolist() == [UNKNOWN] * 5
    assert decode([UNKNOWN]) == "\N{REPLACEMENT CHARACTER}"


FILES = {f"package{i % 3}/module{i}.py": f"x{i} = {i}\n".encode() for i in range(40)}
OTHERS = [
    "test/a.py",
    "json/tests/a.py",
    "site-packages/torch/a.py",
    "__pycache__/a.py",
    "LICENSE.txt",
    "a.pyc",
]


def test_a_corpus_is_the_text_of_all_files_each_in_one_split_in_the_order_of_the_paths(tmp_path):
    found = read_corpus(write(tmp_path, {**FILES, **dict.fromkeys(OTHERS, b"left_out = True\n")}))
    assert found.num_files == 40
    for split in ("train", "val", "test"):
        expected = b"".join(
            FILES[path] for path in sorted(FILES) if split_of(path) == split
        ).decode()
        assert decode(found.splits[split]) == expected != ""


def tokens(*shape):
    return torch.randint(len(VOCABULARY), shape, generator=torch.Generator().manual_seed(0))


def test_later_characters_do_not_change_earlier_logits():
    torch.manual_seed(0)
    model, before = GPT(width=16, depth=2, num_heads=2).eval(), tokens(2, WINDOW)
    for parameter in model.parameters():  # so that blocks do something from the start
        torch.nn.init.normal_(parameter, std=0.5)
    after = before.clone()
    after[:, 70:] = (after[:, 70:] + 1) % len(VOCABULARY)
    with torch.no_grad():
        left, right, short = (model({"tokens": some}) for some in (before, after, before[:, :70]))

    assert list(left.shape) == [2, WINDOW, len(VOCABULARY)]
    assert torch.equal(left[:, :70], right[:, :70])
    assert not torch.isclose(left[:, 70:], right[:, 70:]).all(dim=2).any()
    torch.testing.assert_close(short, left[:, :70], atol=1e-4, rtol=1e-4)


def test_an_untrained_network_guesses_in_nats_and_bits():
    torch.manual_seed(0)
    model = build_model(config())
    batch = {"tokens": tokens(4, WINDOW), "targets": tokens(8, WINDOW)[4:]}
    losses = model(batch)
    assert losses["loss_char"].item() == pytest.approx(math.log(97), abs=0.1)
    assert losses["bits_per_char"].item() == pytest.approx(losses["loss_char"].item() / math.log(2))
    assert [name for name, loss in losses.items() if loss.requires_grad] == ["loss_char"]
    logits = model.eval()({"tokens": batch["tokens"]})
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["targets"].flatten()
    ).item()
    assert expected == pytest.approx(losses["loss_char"].item())
    assert sum(parameter.numel() for parameter in model.parameters()) == 800_000
    assert model.tokens_per_sample == 128
    # 614,400,000 of the weights, 100,663,296 of attention
    assert model.flops_per_sample() == 715_063_296


OPTIONS = [
    "DATASETS.TRAIN",
    ["few_windows"],
    "DATASETS.VAL",
    ["few_windows"],
    "DATASETS.TEST",
    ["few_windows"],
]
OPTIONS += [
    "MODEL.GPT.WIDTH",
    16,
    "MODEL.GPT.DEPTH",
    2,
    "MODEL.GPT.NUM_HEADS",
    2,
    "TEST.IMS_PER_BATCH",
    10,
]
OPTIONS += [
    "SOLVER.MAX_ITER",
    8,
    "SOLVER.IMS_PER_BATCH",
    4,
    "SOLVER.WARMUP_ITERS",
    2,
    "SOLVER.CHECKPOINT_PERIOD",
    3,
]
OPTIONS += ["TEST.EVAL_PERIOD", 4, "LOG.PERIOD", 2, "LOG.WRITERS", ["json"], "SOLVER.BASE_LR", 0.01]


def short(folder, *options):
    return config(*OPTIONS, "OUTPUT_DIR", str(folder), *options)


def run(folder, *options):
    cfg = short(folder, *options)
    seed_all_rng(cfg.SEED)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load()
    trainer.train()
    return trainer


def test_a_run_does_not_go_on_with_another_corpus(tmp_path, monkeypatch):
    run(tmp_path / "run", "SOLVER.MAX_ITER", 4)
    digest = corpus.python_corpus().digest
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(write(tmp_path / "library", FILES)))
    corpus.python_corpus.cache_clear()
    with pytest.raises(
        ConfigError, match=f"started with the library of Python .* .SHA-256 {digest}., but this is"
    ):
        run(tmp_path / "run")
    corpus.python_corpus.cache_clear()


def test_tokens_per_second_and_the_utilization_are_among_the_metrics(tmp_path):
    flops = run(
        tmp_path, "HOOKS", [{"NAME": "Throughput", "PERIOD": 4, "PEAK_TFLOPS": 0.5}]
    ).model.flops_per_sample()
    rows = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]

    def metrics(name):
        return {row["iteration"]: row[name] for row in rows if name in row}

    samples_per_sec = metrics("samples_per_sec")
    assert [*samples_per_sec] == [3, 7]
    for name, factor in (("tokens_per_sec", 128), ("mfu_pct", 100 * flops / 0.5e12)):
        assert metrics(name) == {k: pytest.approx(v * factor) for k, v in samples_per_sec.items()}
    nats, bits = (metrics(f"loss/{name}") for name in ("loss_char", "bits_per_char"))
    assert [*nats] == [3, 8]  # as EVAL_PERIOD says, and at the end
    assert bits == {iter: pytest.approx(loss / math.log(2)) for iter, loss in nats.items()}


def test_a_sample_is_a_function_of_prompt_settings_and_seed_and_the_command_prints_it(
    tmp_path, capsys
):
    trainer = run(tmp_path, "SOLVER.MAX_ITER", 60, "TEST.EVAL_PERIOD", 0)
    (tmp_path / "config.yaml").write_text(trainer.cfg.dump())
    weights = str(tmp_path / "model_best.pth")
    predictor = DefaultPredictor(config(*OPTIONS, "MODEL.WEIGHTS", weights))

    def text(length=40, prompt="import ", **options):
        return "".join(sample.generate(predictor, prompt, length, **options))

    first = text(seed=3)
    torch.manual_seed(1)
    assert text(seed=3) == first
    assert text(length=10, seed=3) == first[:10]
    others = [
        text(seed=4),
        text(seed=3, temperature=0.3),
        text(40, "x" * 40, seed=3),
        text(seed=3, top_k=5),
    ]
    assert len({first, *others}) == 5
    assert decode([UNKNOWN]) not in first

    capsys.readouterr()
    sample.main(
        [
            "--weights",
            weights,
            "--prompt",
            "class ",
            "--length",
            "20",
            "--top-k",
            "9",
            "--seed",
            "2",
        ]
    )
    expected = text(20, "class ", temperature=0.8, top_k=9, seed=2)
    assert capsys.readouterr().out == f"class {expected}\n"
