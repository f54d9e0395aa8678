"""The training settings of every job; a job changes values in its own copy."""

train = dict(
    output_dir="./output",
    init_checkpoint="",  # weights to start with, or to evaluate
    seed=None,  # None: drawn at random
    num_threads=0,  # of torch on the CPU; 0: its own choice
    device="auto",
    max_iter=90000,
    eval_period=5000,
    log_period=20,
    checkpointer=dict(period=5000, max_to_keep=100),
    amp=dict(enabled=False, precision="bfloat16"),  # or "float16"
    ddp=dict(broadcast_buffers=False, find_unused_parameters=False, fp16_compression=False),
    accumulation_steps=1,  # batches per iteration
)
