"""What the README promises of the job that runs without arguments."""

import pytest

from tools import train_net
from trainkit.engine import default_argument_parser
from trainkit.utils.logger import close_logger

pytestmark = pytest.mark.slow


def test_the_last_checkpoint_reads_99_percent_of_the_test_digits(tmp_path):
    options = ["OUTPUT_DIR", str(tmp_path), "LOG.WRITERS", "['json']"]
    trained = train_net.main(default_argument_parser().parse_args(options))
    weights = ["MODEL.WEIGHTS", str(tmp_path / "model_final.pth")]
    evaluated = train_net.main(default_argument_parser().parse_args(["--eval-only", *options, *weights]))
    close_logger()
    assert evaluated == trained
    assert trained["classification"]["top1"] >= 99.0
