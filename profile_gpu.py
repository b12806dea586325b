"""Where the time of a step goes: kernels of one decode step and one prompt of 8B."""
import sys, collections, torch
sys.path.insert(0, "benchmarks")
import bench_static, ceilings
from torch.profiler import profile, ProfilerActivity
limits = ceilings.Ceilings(4.6e12, 790e12, 600e12)
shape, batches, prompts = sys.argv[1], [int(x) for x in sys.argv[2].split(",")], [int(x) for x in sys.argv[3].split(",")]
bench = bench_static.Bench(shape, max(batches), max(*prompts, max(batches)*1100), limits, batches)
def top(name, work, n=14):
    work(); torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        work(); torch.cuda.synchronize()
    kernels = collections.defaultdict(lambda: [0, 0.0])
    begin, end = 1e30, 0
    for e in p.events():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            k = kernels[e.name[:90]]; k[0] += 1; k[1] += e.time_range.elapsed_us()
            begin, end = min(begin, e.time_range.start), max(end, e.time_range.end)
    total = sum(k[1] for k in kernels.values())
    print(f"== {shape} {name}: span {(end-begin)/1e3:.3f} ms, busy {total/1e3:.3f} ms")
    for k, (c, t) in sorted(kernels.items(), key=lambda kv: -kv[1][1])[:n]:
        print(f"   {t/1e3:8.3f} ms {c:5d} x {t/c:7.1f} us  {k}", flush=True)
for b in batches:
    print(bench.decode(b, 1000))
    def graph():
        with torch.inference_mode(): bench.runner._draw(b)
    top(f"decode {b}", graph)
for length in prompts:
    print(bench.prompt(length, 8192))
    def run():
        for begin in range(0, length, 8192):
            count = min(8192, length - begin)
            new = bench.start(1, length) if begin == 0 else []
            bench.runner.launch(bench.plan(0, [count], [begin], bench.slots[begin:begin+count], new)).result()
    top(f"prompt {length}", run)
