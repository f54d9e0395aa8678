"""The rows of docs/asked_for.md name real threads, and settings that are accepted; other tests show what they do."""

import re
import shlex

from tests.docs.pages import page
from tools import train_net
from trainkit.config import check_values, get_cfg
from trainkit.engine import default_argument_parser

DONE, NOT_DONE = (
    re.findall(r"^\| (.+?) \| (\[.+?\)) \| (.+) \|$", text, re.MULTILINE)
    for text in page("docs/asked_for.md").split("## What trainkit does not do")
)
REPOSITORIES = {
    "detectron2": "facebookresearch/detectron2",
    "lightning": "Lightning-AI/pytorch-lightning",
    "transformers": "huggingface/transformers",
    "accelerate": "huggingface/accelerate",
    "trl": "huggingface/trl",
}


def settings_of(answer):
    """The first ones in a cell, as words of the command line."""
    return shlex.split(next(iter(re.findall(r"`(--\w[^`]*|[A-Z_.]+ [^`]+)`", answer)), ""))


def test_each_row_has_a_real_repository_and_settings_that_are_accepted():
    assert len(DONE) > 20
    for _, threads, answer in [*DONE, *NOT_DONE]:
        for library, number, link in re.findall(r"\[(\w+)#(\d+)\]\((.+?)\)", threads):
            assert re.fullmatch(rf"https://github.com/{REPOSITORIES[library]}/(issues|pull)/{number}", link)
        cfg = get_cfg()
        cfg.merge_from_file(train_net.DEFAULT_CONFIG)
        cfg.SOLVER.WARMUP_ITERS = 0  # as in the command of the page
        cfg.merge_from_list(default_argument_parser().parse_args(settings_of(answer)).opts)
        check_values(cfg)
