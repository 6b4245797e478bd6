"""Proofs about a run, before it costs a week: `titan-linear doctor` prints a line for each
(docs/proof.md).

    subject.py   the subject: the run's model, cut to one period of its layers, and a few streams
    findings.py  a line: what was compared, the figure, its bound, and where the worst error is
    ranks.py     the run's ranks in one process, and a step on them as the trainer takes it
    data.py      labels, the cut of a batch, streams under other degrees
    cases.py     the ops of each mixer, with their definitions
    ops.py       ops and mixers: split among ranks, against their oracles, documents alone, repeated
    model.py     the whole model: split among ranks against one process, documents alone, a step
                 repeated
    processes.py under torchrun, the same step on the run's own processes: FSDP2, the mesh,
                 collectives of the devices
    resume.py    a save, a resume, and the step after it
    hf.py        logits of a Hugging Face folder against transformers' logits
    doctor.py    all of it, as a command; `prove` runs it before a run (`doctor.at_start`)

A check is a generator of findings: `for finding in check(subject)`. References are computed
by code other than the code under proof, where other code exists: boundaries from
`cu_seqlens` without a plan, products in float64, counts by hand.
"""
