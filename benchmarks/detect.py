"""What `detect` costs a call: an unmarked batch of ids, mask and positions examined, plan included.

    python benchmarks/detect.py [--rows 64] [--columns 16384] [--group 16]

Prints the median of 50 calls in milliseconds: in all, and of the part on the host that chooses the groups.
"""

import argparse
import statistics
import time

import torch

from dualkv_compile import detect
from dualkv_compile.options import Options

NAMES = ("l_input_ids_", "l_attention_mask_", "l_position_ids_")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--columns", type=int, default=16384)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--calls", type=int, default=50)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, (arguments.rows, arguments.columns), generator=g)
    prompt = arguments.columns * 3 // 4
    for first in range(0, arguments.rows, arguments.group):
        ids[first : first + arguments.group, :prompt] = ids[first, :prompt]
    ids[:, : arguments.columns // 16] = ids[0, : arguments.columns // 16]  # a system prompt
    ids = ids[torch.randperm(arguments.rows, generator=g)].to(device)
    batch = (ids, torch.ones_like(ids), torch.arange(arguments.columns, device=device).repeat(arguments.rows, 1))

    def synchronize():
        if device == "cuda":
            torch.cuda.synchronize()

    whole, grouping, choose = [], [], detect.best_groups

    def timed(*args):
        begin = time.perf_counter()
        groups = choose(*args)
        grouping.append(time.perf_counter() - begin)
        return groups

    detect.best_groups = timed
    for _ in range(arguments.calls):
        synchronize()
        begin = time.perf_counter()
        marks = detect.settled({}, NAMES, range(3), batch, Options(detect=True))
        synchronize()
        whole.append(time.perf_counter() - begin)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {name}: {arguments.rows} x {arguments.columns} ids, {marks[0].plan}")
    print(f"{1e3 * statistics.median(whole):.3f} ms, of which {1e3 * statistics.median(grouping):.3f} ms choose the groups")


if __name__ == "__main__":
    main()
