"""Keys with detectron2's names have detectron2's defaults."""

import yaml

from trainkit.config import CfgNode, get_cfg

DEFAULTS = """
SEED: -1
VIS_PERIOD: 0
CUDNN_BENCHMARK: false
OUTPUT_DIR: ./output
DATALOADER: {NUM_WORKERS: 4, SAMPLER_TRAIN: TrainingSampler}
TEST: {EVAL_PERIOD: 0, EXPECTED_RESULTS: []}
SOLVER:
  {MAX_ITER: 40000, IMS_PER_BATCH: 16, CHECKPOINT_PERIOD: 5000, BASE_LR: 0.001, BASE_LR_END: 0.0, MOMENTUM: 0.9,
   NESTEROV: false, WEIGHT_DECAY: 0.0001, WEIGHT_DECAY_NORM: 0.0, WEIGHT_DECAY_BIAS: null, BIAS_LR_FACTOR: 1.0,
   LR_SCHEDULER_NAME: WarmupMultiStepLR, GAMMA: 0.1, STEPS: [30000], NUM_DECAYS: 3, WARMUP_FACTOR: 0.001,
   WARMUP_ITERS: 1000, WARMUP_METHOD: linear, RESCALE_INTERVAL: false, AMP: {ENABLED: false},
   CLIP_GRADIENTS: {ENABLED: false, CLIP_TYPE: value, CLIP_VALUE: 1.0, NORM_TYPE: 2.0}}
"""


def test_the_defaults_of_detectron2s_keys_are_detectron2s():
    cfg = get_cfg()
    cfg.merge_from_other_cfg(CfgNode(yaml.safe_load(DEFAULTS)))
    assert cfg == get_cfg()
