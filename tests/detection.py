"""Print which losses a number of blocks detects: `python -m tests.detection LOG...`, with logs of `imagebuild compare`.

The blocks of the logs are drawn at random, without their own mean, and get a loss. A cell is the share of such
comparisons that are called slower; in the column 0, slower or faster."""

import random
import sys
from collections import defaultdict
from statistics import fmean

from imagebuild.bench.alternation import ERROR_RATE
from imagebuild.bench.paired import bootstrap_interval
from imagebuild.bench.read import read_files

BLOCKS, LOSSES, DRAWS = (10, 20, 40), (0, 0.5, 1, 2, 5), 200

draw = random.Random(1)
noise: defaultdict[int, list[float]] = defaultdict(list)
for pair in read_files(sys.argv[1:]).paired:
    for item in pair.differences:
        if item.is_headline:
            noise[item.size_bytes] += [value - fmean(item.values) for value in item.values]
sys.stdout.write("\t".join(("bytes", "blocks", *(f"{loss:g} %" for loss in LOSSES))) + "\n")
for size, values in sorted(noise.items()):
    for blocks in BLOCKS:
        shares = []
        for loss in LOSSES:
            drawn = [tuple(value - loss for value in draw.choices(values, k=blocks)) for _ in range(DRAWS)]
            found = [bootstrap_interval(each, ERROR_RATE) for each in drawn]
            shares.append(fmean(high < 0 or (not loss and low > 0) for low, high in found))
        sys.stdout.write("\t".join((str(size), str(blocks), *(f"{share:.0%}" for share in shares))) + "\n")
