"""Everything between two weights. To be read in this order:

feed.py       which tokens of a batch this rank computes, and what is planned for its mixers; the micro-batches of each
              step, read ahead, with the step's counts of tokens
passes.py     forward and backward, by micro-batch
update.py     gradients summed over ranks, the update, the experts' biases
optimizer.py  AdamW or Muon, copies of the weights for mixed precision, the learning rate, clipping
flops.py      what a step computes, and the peak of GPUs
"""
