"""Proofs about a run, before it costs a week: what `tools/doctor.py` prints, a line each (docs/proof.md).

    subject.py   what is examined: the run's model, cut to one period of its layers, and a few of its streams
    findings.py  a line: what was compared, the figure, its bound, and where the worst of it lies
    ranks.py     the run's ranks in one process, and a step on them as the trainer takes it
    data.py      labels, the cut of a batch, streams under other degrees
    ops.py       ops and mixers: split among ranks, beside their oracles, documents apart, repeated
    model.py     the whole model: split among ranks and in one process, documents alone, two steps alike
    processes.py under torchrun, the same step on the run's own processes: FSDP2, the mesh, collectives of the devices
    resume.py    a save, a resume, and the step after it
    hf.py        logits of a Hugging Face folder beside those of transformers
    doctor.py    all of it, as a command; start.py: before a run

A check is a generator of findings: `for finding in check(subject)`. Its references are computed by other code than what
they prove, where there is other code: boundaries from `cu_seqlens` without a plan, products in float64, counts by hand.
"""
