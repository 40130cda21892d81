"""What the runs of `straight` and `resumed` have in common."""

TRAINING = ["debug=tiny", "data=tokens", "data.path=t.bin", "data.val_fraction=0.1", "model.dropout=0.1", "accum=4",
            "micro_batch=1", "eval_every=3", "save_every=5", "keep=-1", "name=straight"]  # fmt: skip
"""A little over half of an epoch of 24 samples in one window of four; ten windows are two epochs."""
