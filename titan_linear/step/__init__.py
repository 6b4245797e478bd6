"""Everything that happens between two versions of the weights.

Read the files in this order:

cut.py        the tokens of a batch that this rank computes, and the plan for its mixers
branches.py   the same for prefix trees
feed.py       the micro-batches of each step, read ahead, with the step's token counts
passes.py     forward and backward, one micro-batch at a time
update.py     gradients summed over ranks, the update, the experts' biases
optimizer.py  AdamW or Muon, weight copies for mixed precision, learning rate, clipping
flops.py      floating-point operations of a step, and the peak rate of GPUs
"""
