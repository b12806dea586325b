"""`make golden`: every family against its reference, in a table that is printed and written to a file."""

import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.multiprocessing as mp

from lightllm.distributed.parallel_state import ParallelState

sys.path.insert(0, str(Path(__file__).parents[1]))
from model.family_lines import MOST, family_lines
from model.harness import Driver, load
from model.remote_code import BUILDERS
from model.test_golden import CONFIGS, LENGTHS, NEW_TOKENS, Golden

COLUMNS = ("prefill", "chunk 1", "chunk 7", "chunk 16", "prefix hit", "decode", "mixed batch", "tp 2", "bf16")
UNEVEN = {"llama-odd"}  # sizes that two ranks cannot share


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    return f"{(ours - theirs).abs().max():.0e}"


def row(golden: Golden, path: Path, of_ranks: torch.Tensor | None) -> list[str]:
    driver, ids, want = Driver(golden.model), golden.prompts[-1], golden.logits[-1]
    cells = [distance(driver.prefill(ids, chunk)[1], want) for chunk in (10**6, 1, 7, 16)]
    first = driver.add(ids)
    driver.step([(first, 16)])
    second = driver.add(ids, prefix=first)
    cells.append(distance(driver.step([(second, len(ids) - 16)], all_logits=True), want[16:]))
    same = lambda got, wanted: "same" if got == wanted else "OTHER"
    cells.append(same(Driver(golden.model).generate([ids], NEW_TOKENS)[0], golden.tokens[-1]))
    cells.append(same(Driver(golden.model).generate(golden.prompts, NEW_TOKENS, 7), list(golden.tokens)))
    cells.append("refused" if of_ranks is None else distance(of_ranks, want))
    half = Driver(load(path, dtype=torch.bfloat16)).prefill(ids)[1][-1].log_softmax(-1)
    token = golden.tokens[-1][0]
    return [*cells, distance(half[token], want[-1].log_softmax(-1)[token])]


def rank_main(rank: int, root: str, prompts: dict[str, list[int]]) -> None:
    torch.set_num_threads(1)
    parallel = ParallelState.init(rank, 2, "gloo", f"{root}/meet")
    logits = {}
    for name, ids in prompts.items():
        model = load(f"{root}/{name}", parallel, device=torch.device("cpu"))
        logits[name] = Driver(model).prefill(ids)[1]
    if rank == 0:
        torch.save(logits, f"{root}/logits.pt")


HEAD = f"""# Model families

Written by `make golden`. Each line is one tiny random checkpoint, under a config in which the family's features bite,
against transformers (families of remote code: against references of their own in `test/model/remote_code.py`). Numbers
are the largest difference of a logit in float32 over a prompt of {LENGTHS[-1]} tokens; "same" are the greedy tokens of
{NEW_TOKENS} steps. bf16: difference of the log-probability of the first generated token from float32, with random
weights whose logits reach tens.
"""


def main(path: Path) -> None:
    lines = [HEAD, "|".join(("", "checkpoint", *COLUMNS, "")), "|".join(("", *["---"] * (len(COLUMNS) + 1), ""))]
    print(*lines[1:], sep="\n")
    with tempfile.TemporaryDirectory() as root:
        goldens = {name: Golden(name, Path(root) / name) for name in [*CONFIGS, *BUILDERS]}
        prompts = {name: golden.prompts[-1] for name, golden in goldens.items() if name not in UNEVEN}
        mp.spawn(rank_main, (root, prompts), nprocs=2)
        of_ranks = torch.load(f"{root}/logits.pt")
        for name, golden in goldens.items():
            lines.append("|".join(("", name, *row(golden, Path(root) / name, of_ranks.get(name)), "")))
            print(lines[-1], flush=True)
    count = [
        "",
        "Lines of each family, all files of its folder without blank lines:",
        "",
        "|family|kind|lines|at most|",
    ]
    count += ["|---|---|---|---|"]
    count += [f"|{family}|{kind}|{n}|{MOST[kind]}|" for family, (kind, n) in family_lines().items()]
    print(*count, sep="\n")
    path.write_text("\n".join((*lines, *count, "")))


if __name__ == "__main__":
    os.environ["TQDM_DISABLE"] = "1"
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
