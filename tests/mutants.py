"""Small wrong changes of the package. The tests that each one names must notice it.

    python -m tests.mutants                  # a line for each; exits with 1 if one survives
    python -m tests.mutants kcp packing      # those whose lines hold one of these words

A mutant is what to find, what to put in its place, and the tests to run. The text occurs once in the package, whatever
the file; so does the name of a file of tests below tests/. Each runs in a copy of the checkout, so that the checkout
stays as it is. A mutant is dead if a test fails; code that cannot be imported counts for nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FAILED = 1  # pytest's exit code where a test failed; others are those of errors before any test
SECONDS = 300  # after which a mutant counts as dead: it hangs


class Mutant(NamedTuple):
    old: str
    new: str
    # "test_pools.py", or "test_pools.py: permuted" for those whose names match pytest's -k
    tests: str


MUTANTS = [
    # functions of log p
    Mutant(
        "value.detach() * counts", "value.detach()", "test_session.py: any_function and contiguous"
    ),
    Mutant("[list(order)].flatten()", ".flatten()", "test_session.py: any_function and zigzag"),
    # prefix trees
    Mutant(
        "*Documents.of(trees.edges, trees.depth)",
        "*Documents.of(trees.edges)",
        "runs/test_trees.py",
    ),
    Mutant("share[leaves][number] / share[node]", "np.ones(len(node))", "runs/test_trees.py"),
    Mutant("self.positions > tokens", "self.positions >= tokens", "runs/test_trees.py"),
    Mutant("inside = positions >= torch", "inside = positions > torch", "runs/test_trees.py"),
    Mutant("most = min(len(a), len(b)) - 1", "most = min(len(a), len(b))", "runs/test_trees.py"),
    Mutant(
        "np.where(last, edges[run + 1], np.append(end[1:], 0))",
        "edges[run + 1]",
        "ops/test_trees.py: one_rank",
    ),
    Mutant("entry[owner[number] != owner[entry]]", "entry[:0]", "ops/test_trees.py: ranks"),
    # --- ops: the recurrences, the convolution, attention, the loss
    Mutant(
        "solved(L, k * gamma * beta, v * beta)",
        "solved(L, k * gamma, v * beta)",
        "ops/test_recurrences.py",
    ),
    Mutant("k * sums_after(g).exp(), q * gamma", "k * gamma, q * gamma", "ops/test_recurrences.py"),
    Mutant(
        "(0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)",
        "(0, 0, 0, 1)).cumsum(-2)",
        "ops/test_recurrences.py",
    ),
    Mutant("G = g.cumsum(-2)  #", "G = g.cumsum(-2) - g  #", "ops/test_recurrences.py"),
    Mutant("own - (weight.shape[1] - 1)", "own - weight.shape[1]", "test_convolution.py"),
    Mutant("torch.sigmoid(lse_block - lse)", "torch.sigmoid(lse - lse_block)", "test_attention.py"),
    Mutant(
        "masked_fill_(target < 0, 0)", "masked_fill_(target < -200, 0)", "test_losses.py: gradients"
    ),
    Mutant("c.where(target >= 0, 0)", "c.where(target > 0, 0)", "ops/test_cross_entropy.py"),
    # --- ops: context parallelism
    Mutant("first if fragments[before].through else before", "before", "test_kcp.py"),
    Mutant("(M.mT if reverse else M).double()", "M.double()", "test_kcp.py"),
    Mutant("np.where(passed, STATE, NOTHING)", "STATE", "test_levels.py: same"),
    Mutant(
        "tokens > self.edges[node], tokens - 1",
        "tokens >= self.edges[node], tokens - 1",
        "test_kcp.py",
    ),
    Mutant(
        "if hop > 1:\n            here += self.mine",
        "if hop > 2:\n            here += self.mine",
        "test_attention_cp.py",
    ),
    Mutant("1 if hop < self.hops else -self.hops", "1", "test_attention_cp.py"),
    Mutant("own.masked_fill((own < 0)", "own.masked_fill((own <= 0)", "test_tensor_parallel.py"),
    Mutant("(own >= rows), ELSEWHERE", "(own > rows), ELSEWHERE", "test_tensor_parallel.py"),
    Mutant(
        ".where(ids != IGNORE, IGNORE)",
        ".where(ids != IGNORE, ELSEWHERE)",
        "triton/test_cross_entropy.py",
    ),
    Mutant(
        "into = of.token_losses[tokens]",
        "into = of.token_losses[: len(none)]",
        "ops/test_cross_entropy.py",
    ),
    Mutant("inside = at < document_ends", "inside = at < len(document_ends)", "models/test_mtp.py"),
    Mutant("if torch.is_grad_enabled() else (own,)", "if False else (own,)", "models/test_mtp.py"),
    Mutant(
        "torch.cat([token, h], -1), own, caches",
        "torch.cat([h, token], -1), own, caches",
        "models/test_mtp.py",
    ),
    Mutant("keepdim=True) + 1e-6)).to", "keepdim=True) + 1e-5)).to", "ops/test_delta_rule.py"),
    Mutant(
        "(ranks[::-1] if mirrored[s] else ranks)",
        "ranks",
        "test_attention_cp.py: nodes_on or eight",
    ),
    Mutant("step * self.stride", "step", "test_attention_cp.py: nodes_on or eight"),
    # --- models
    Mutant("LATENT_EPS = 1e-6", "LATENT_EPS = 1e-5", "test_families.py: theirs"),
    Mutant(
        "GatedRMSNorm(self.v_head_dim, eps, act",
        "GatedRMSNorm(self.v_head_dim, 1e-5, act",
        "test_families.py: theirs",
    ),
    Mutant(
        "angle = self.position_ids.double()", "angle = self.position_ids.float()", "test_layers.py"
    ),
    Mutant("device=device, dtype=torch.float64) / half", "device=device) / half", "test_layers.py"),
    Mutant("several = (count > 1)", "several = (count > 0)", "test_layers.py"),
    Mutant("plan.cu_seqlens, self.scale)}", "plan.cu_seqlens)}", "test_telemetry.py: definitions"),
    Mutant(
        "a, b, rest = widen(x).split([half, half, x.shape[-1] - 2 * half], dim",
        "b, a, rest = widen(x).split([half, half, x.shape[-1] - 2 * half], dim",
        "test_layers.py",
    ),
    Mutant(
        'eigval": self.beta_range == 2.0,\n',
        'eigval": self.beta_range != 2.0,\n',
        "test_families.py",
    ),
    Mutant("grouped.topk(2, -1)", "grouped.topk(1, -1)", "test_moe.py"),
    Mutant(
        "y if self.shared_gate is None else y *", "y if self.shared_gate else y +", "test_moe.py"
    ),
    Mutant("offsets[cut] * strides[cut] -", "0 * strides[cut] -", "test_init.py"),
    Mutant("else self.mlp_norm(x)", "else x", "test_families.py"),
    Mutant("low - begin, high - begin, ours", "low, high, ours", "test_families.py"),
    # --- data
    Mutant(
        "np.append(trees.back[1:], next",
        "np.append(np.ones_like(trees.back[1:]), next",
        "test_packing.py",
    ),
    Mutant("if end < self.corpus.offsets", "if end <= self.corpus.offsets", "test_packing.py"),
    Mutant("use=(pool + 1, 0, 0)", "use=(pool, 0, 0)", "test_pools.py"),
    Mutant("self._before[n].get(name, 0) + own", "own", "test_mixture.py"),
    Mutant(
        "(n * dp_degree + dp_rank) * local_batch_size",
        "(n * dp_degree) * local_batch_size",
        "test_loader.py",
    ),
    Mutant(
        "self.next_stream += self.global_batch_size",
        "self.next_stream += self.local_batch_size",
        "test_loader.py",
    ),
    Mutant("(places[:, 0] < end) & (begin", "(places[:, 0] <= end) & (begin", "test_chat.py"),
    Mutant(
        'column("weights", following)',
        'column("weights", positions)',
        "data/corpus/test_chat.py: streams",
    ),
    Mutant("np.minimum(document_ends, last) - begin", "document_ends - begin", "test_packing.py"),
    Mutant("math.ceil(holdout * 2**53)", "math.floor(holdout * 2**53)", "test_packing.py"),
    Mutant(
        "least = -(-self.sums[-1] // min(counts))",
        "least = self.sums[-1] // min(counts)",
        "test_mixture.py",
    ),
    Mutant("use=(0, 1, self.start)", "use=(0, 1, 0)", "test_mixture.py"),
    # --- losses
    Mutant(
        "reward[0::2] - reward[1::2]",
        "reward[1::2] - reward[0::2]",
        "test_losses.py: defined and DPO",
    ),
    Mutant(
        "context.ranks.world_size\n        ).sum(0)",
        "context.ranks.world_size\n        )[0]",
        "test_losses.py: splits and cp and DPO",
    ),
    Mutant("[pull, -pull]", "[pull, pull]", "test_losses.py: defined and SimPO"),
    Mutant(
        "first_pass.logprobs[:, 0] - batch",
        "first_pass.logprobs[:, 0] + batch",
        "test_losses.py: defined and GSPO",
    ),
    Mutant(
        "self.columns[name], np.minimum(positions,",
        "self.columns[name], np.minimum(positions - 1,",
        "test_columns.py",
    ),
    Mutant(
        "np.add.reduceat(weights > 0, edges",
        "np.add.reduceat(weights >= 0, edges",
        "test_columns.py",
    ),
    Mutant(
        "first = documents // self.corpus.group * self",
        "first = documents * self",
        "test_columns.py",
    ),
    Mutant(
        "len(stream.cu_seqlens) // 2 * 2",
        "len(stream.cu_seqlens) - 1",
        "test_losses.py: defined and DPO",
    ),
    Mutant(
        "bounded.exp() * advantages",
        "log_ratio.exp() * advantages",
        "test_losses.py: defined and GRPO",
    ),
    Mutant(
        "(bounded != log_ratio) & (advantages != 0)",
        "bounded == log_ratio",
        "test_losses.py: defined and GSPO",
    ),
    Mutant("torch.heaviside(margin", "torch.heaviside(-margin", "test_losses.py: defined and DPO"),
    Mutant(
        "clipped=clipped, kl=kl)",
        "clipped=clipped, kl=2 * kl)",
        "test_losses.py: defined and GRPO",
    ),
    Mutant(
        "np.maximum(a.document.weights[:common], b.document.weights[:common])",
        "b.document.weights[:common]",
        "runs/test_trees.py: alone",
    ),
    Mutant(
        "keep(folder, scores, min(n * each, end))",
        "keep(folder, scores, min((n + 1) * each, end))",
        "test_score.py: noted",
    ),
    Mutant("if votes_before >= votes_now:", "if True:", "runs/test_trees.py: disagree"),
    Mutant("tau**2 *", "tau *", "test_losses.py: defined and distillation"),
    Mutant("(parts[:, 2] * shares).sum(0)", "parts[:, 2].mean(0)", "test_losses.py: gradients"),
    Mutant("return positions.copy()", "return positions - 1", "test_score.py: one and process"),
    Mutant(
        "logits[:, max(vocab_size", "logits[:, max(9 * vocab_size", "test_score.py: one and process"
    ),
    # --- the step
    Mutant(
        "(experts >= 0) & (experts < len(self.counts))",
        "experts >= 0",
        "distributed/test_experts.py",
    ),
    Mutant("positive = F.relu(wide)", "positive = wide", "triton/test_experts.py"),
    Mutant("balance / moe.ranks.size", "balance", "test_train.py: mixtures and qwen"),
    Mutant("(name in splits or tp_rank == 0)", "tp_rank == 0", "test_train.py: float64 and tp"),
    Mutant("if name not in splits]", "if name in splits]", "test_train.py: float64 and tp"),
    Mutant("missing.sign() * finite", "missing.sign()", "test_moe.py"),
    Mutant("elsewhere = (own < 0)", "elsewhere = (own <= 0)", "test_tensor_parallel.py"),
    Mutant("(p.dim() > 1, mesh)", "(p.dim() > 0, mesh)", "test_optim.py"),
    Mutant(
        "peak * step / config.warmup_steps",
        "peak * (step - 1) / config.warmup_steps",
        "test_optim.py",
    ),
    Mutant("grad_norm + 1e-6)).clamp(max=1.0)", "grad_norm + 1e-6))", "test_optim.py"),
    # large tensors: clipped twice, and not at all; then a step that is skipped
    Mutant("clip.float().to(p[0]", "clip.square().float().to(p[0]", "test_adamw.py: large"),
    Mutant("clip.float().to(p[0]", "torch.ones_like(clip).float().to(p[0]", "test_adamw.py: large"),
    Mutant("skipped.to(p[0].device)", "0 * skipped.to(p[0].device)", "test_adamw.py: large"),
    Mutant("found_inf=skipped", "found_inf=0 * skipped", "test_adamw.py: large"),
    # copies of weights
    Mutant(
        "copies.current(x) if copies else None",
        "copies.copy_of.get(x) if copies else None",
        "test_large_tensors.py: stale",
    ),
    Mutant(
        "lr, self.max_norm, self.copies)", "lr, self.max_norm)", "test_large_tensors.py: process"
    ),
    Mutant("copy == 0 and (name in splits", "(name in splits", "test_train.py: 4 and sharded"),
    Mutant(
        "self.loss.isfinite() & self.grad_norm.isfinite()", "self.loss.isfinite()", "test_optim.py"
    ),
    Mutant(
        "squares.sum().sqrt(), signals.max()",
        "squares.sum().sqrt(), signals.min()",
        "test_optim.py",
    ),
    Mutant("load.sum() - len(load) * load", "len(load) * load - load.sum()", "test_moe.py"),
    Mutant(
        "elsewhere = (own < 0) | (own >= rows)",
        "elsewhere = (own < 0) | (own > rows)",
        "test_tensor_parallel.py",
    ),
    # --- storage
    Mutant(
        "len(older) + 1 - self.keep_latest_k",
        "len(older) - self.keep_latest_k",
        "test_checkpoint.py: keep_latest",
    ),
    Mutant(
        "_step(path, number, line) <= step", "_step(path, number, line) < step", "test_rundir.py"
    ),
    Mutant(
        "inspect(file) != sums[file.name]",
        "inspect(file)[0] != sums[file.name][0]",
        "test_checkpoint.py: disk",
    ),
    # --- what is observed and planned
    Mutant("loss <= mean + self.sigmas * sigma", "loss <= mean + sigma", "test_spikes.py"),
    Mutant("n * (n + 1) // 2", "n * (n - 1) // 2", "test_flops.py"),
    Mutant("optimizer = 2 * stored -", "optimizer = stored -", "test_memory.py"),
    Mutant("3.5 * flops / both", "2.5 * flops / both", "commands/test_plan.py: what_was_measured"),
    Mutant("before < sampling.top_p", "before <= sampling.top_p", "test_generate.py"),
    # --- what is refused, and what is not left out
    Mutant("all(map(le, grid, GRID_LIMITS))", "True", "test_grids.py"),
    Mutant('if sum(map(text.count, "[{(")) <= most:', "if True:", "test_nesting.py"),
    Mutant(
        "target.is_file() and target.is_relative_to(within)",
        "target.exists()",
        "run/test_merge.py: copied",
    ),
    Mutant(
        "uniform(1 / math.sqrt(inputs))", "uniform(2 / math.sqrt(inputs))", "models/test_lora.py"
    ),
    Mutant(
        "if np.array_equal(pair[0].tokens, pair[1].tokens):",
        "if False:",
        "test_preferences.py",
    ),
    Mutant(
        "if adapters := config.adapter.initial_load_path:",
        "if adapters := False:",
        "run/test_merge.py",
    ),
]


def place(mutant: Mutant) -> Path:
    """The file of the package that the mutant changes. ValueError: there is no such place, or there are several."""
    files = (ROOT / "titan_linear").rglob("*.py")
    found = [
        file.relative_to(ROOT) for file in files if mutant.old in file.read_text(encoding="utf-8")
    ]
    if len(found) != 1 or (ROOT / found[0]).read_text(encoding="utf-8").count(mutant.old) != 1:
        raise ValueError(
            f"{mutant.old!r} is not once in the package but in {[str(file) for file in found]}: rewrite it"
        )
    return found[0]


def tests_of(mutant: Mutant) -> list[str]:
    """Arguments of pytest."""
    name, _, words = mutant.tests.partition(": ")
    (file,) = (file for file in (ROOT / "tests").rglob("*.py") if str(file).endswith(f"/{name}"))
    return [str(file.relative_to(ROOT)), *(["-k", words] if words else [])]


def run(copy: Path, arguments: list[str]) -> int | None:
    """pytest's exit code in a copy of the checkout; None: it took too long."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    try:
        return subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=SECONDS
        ).returncode
    except subprocess.TimeoutExpired:
        return None


def survives(mutant: Mutant, copy: Path) -> str:
    """Why the mutant is not dead; "" if it is."""
    file = copy / place(mutant)
    whole = file.read_text(encoding="utf-8")
    file.write_text(whole.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        code = run(copy, tests_of(mutant))
    finally:
        file.write_text(whole, encoding="utf-8")
    return "" if code in (FAILED, None) else "survives" if code == 0 else f"pytest ends with {code}"


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if not words or any(word in f"{place(m)} {m}" for word in words)]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "checkout")
        listed = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in listed.stdout.splitlines():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
        for mutant in chosen:
            begin, why = time.perf_counter(), survives(mutant, copy)
            wrong += bool(why)
            said = f"{why or 'dead':<10} {time.perf_counter() - begin:4.0f} s  {place(mutant)}: {mutant.old!r}"
            print(f"{said} → {mutant.new!r} ({mutant.tests})", flush=True)
    print(f"{len(chosen) - wrong} of {len(chosen)} are dead")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
